"""Mixture-of-experts routers: recorded for the load-balancing loss, or made to replay given choices.

A router scores all experts for each token and sends the token to a few of them. `token_logprobs` lays out each forward
pass, so it writes to the model's `Routers` which positions are tokens and which are padding.

Routing replay (R3, arXiv:2510.11370; first for several updates in GSPO, arXiv:2507.18071): each token uses the experts
that computed it when it was sampled. Their gates are computed by the model itself, so its routers are trained.

Shapes: R routers, N positions of a forward pass, E experts, K experts per token, L layers, B rows of T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.packing import Packed, find_head_path
from llmrl.modules.llm.sequence_split import active_split

_active: Tensor | None = None  # int16[N, L, K], -1 where the model's own routers choose


class RouterLoad(NamedTuple):
    """The routers' choices for the tokens of a batch, as sums, so that parts of a batch can be added.

    ``chosen_RE``  float32  tokens that each router would send to each expert without replay
    ``probs_RE``   float32  router probabilities, summed over the tokens, with grad
    ``tokens``     float32  number of tokens
    ``replayed``   float32  number of replayed choices, over all routers
    ``differing``  float32  number of replayed choices that differ from the router's own
    """

    chosen_RE: Tensor
    probs_RE: Tensor
    tokens: Tensor
    replayed: Tensor
    differing: Tensor


def router_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers records ``router_logits`` from, in the order of the layers; [] for a dense model.

    >>> from llmrl.testing import tiny_model
    >>> len(router_modules(tiny_model(architecture="qwen3_moe", layers=2))), router_modules(tiny_model())
    (2, [])
    """
    kinds = {}
    for part in model.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            kinds[recorder.target_class] = recorder.layer_name
    return [
        module
        for name, module in model.named_modules()
        if any(isinstance(module, kind) and (suffix or "") in name for kind, suffix in kinds.items())
    ]


class Routers:
    """The routers of ``model``, which gets this object as its attribute ``routers``; ``count`` is 0 if it is dense.

    ``is_real``  bool[N], the positions of the forward pass that are tokens; written by ``token_logprobs``
    Raises       ConfigError for a model whose head cannot be called separately from its body
    """

    def __init__(self, model: nn.Module) -> None:
        modules = router_modules(model)  # not stored: their hooks refer to this object
        self.count = len(modules)
        names = {id(module): name for name, module in model.named_modules()}
        parts = [names[id(module)].split(".") for module in modules]
        self.layers = [next((int(part) for part in own if part.isdigit()), 0) for own in parts]  # decoder layer numbers
        self.is_real: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor | None]] | None = None
        if not modules:
            return
        if find_head_path(model) is None:
            raise ConfigError(
                f"routers: {type(model).__name__} must compute its logits as head(body) for experts to be balanced; "
                "use model_options.router_aux_loss=0."
            )
        for number, module in enumerate(modules):
            module.register_forward_hook(partial(self._see, number))
        model.routers = self

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """The model's `Routers`; created on first use."""
        return getattr(model, "routers", None) or cls(model)

    def _see(self, number: int, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Forward hook of a router: records its own choices; with replay, returns its output for the given routes."""
        routes_NK = None if _active is None else _active[:, self.layers[number]].long()
        if self._seen is not None:
            parts = _tensors(output)
            indices = next((part for part in parts if not part.is_floating_point()), None)
            count = getattr(module, "num_experts", None) or parts[0].shape[-1]
            scores = (part for part in parts if part.is_floating_point() and part.shape[-1] == count)
            logits = next(scores).flatten(0, -2)
            if indices is None:  # the router returns only its scores
                indices = logits.topk(module.top_k, dim=-1).indices
            self._seen[number] = (logits, indices.reshape(len(logits), -1), routes_NK)
        # This also replays when checkpointing recomputes a layer: the caller sets the routes again for that.
        return None if routes_NK is None else _route(module, arguments, routes_NK)

    def choices(self) -> Tensor:
        """The experts of the last recorded forward pass, int16[N, L, K]; -1 in layers without a router."""
        seen, self._seen = self._seen, {}
        rows = [indices_NK.to(torch.int16) for _, (_, indices_NK, _) in sorted(seen.items())]
        routes_NLK = rows[0].new_full((len(rows[0]), max(self.layers) + 1, rows[0].shape[1]), -1)
        routes_NLK[:, self.layers] = torch.stack(rows, dim=1)
        return routes_NLK

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes inside. `choices` (called inside) and `load` (after) report the last one."""
        self._seen = {}
        try:
            yield
        finally:
            self._last, self._seen = self._seen, None

    def load(self) -> RouterLoad:
        """The load of the last recorded forward pass, over its tokens without padding."""
        chosen, probs = [], []
        real = self.is_real.float()
        replayed, differing = real.new_zeros(()), real.new_zeros(())
        for _, (logits_NE, indices_NK, routes_NK) in sorted(self._last.items()):
            weight_NE = real[:, None].expand_as(logits_NE)
            chosen.append(torch.zeros_like(weight_NE).scatter_(1, indices_NK, 1.0).mul_(weight_NE).sum(0))
            probs.append((logits_NE.float().softmax(-1) * weight_NE).sum(0))
            if routes_NK is not None:
                given_N = real * (routes_NK[:, 0] >= 0)
                replayed += given_N.sum()
                differing += (given_N * (routes_NK.sort(-1).values != indices_NK.sort(-1).values).any(-1)).sum()
        self._last = {}
        return RouterLoad(torch.stack(chosen), torch.stack(probs), real.sum(), replayed, differing)


def _tensors(output: Any) -> list[Tensor]:
    return [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)]


# --- replay -----------------------------------------------------------------------------------------------------------


def active_routes() -> Tensor | None:
    """The routes that are replayed in this pass; `same_routes` sets them again when a part of it is recomputed."""
    return _active


@contextmanager
def same_routes(routes_NLK: Tensor | None) -> Iterator[None]:
    """Forward passes inside replay these routes, one row per position."""
    global _active
    before, _active = _active, routes_NLK
    try:
        yield
    finally:
        _active = before


@contextmanager
def replaying(
    model: nn.Module, routes_BTLK: Tensor, attention_BT: Tensor, packed: Packed | None = None
) -> Iterator[None]:
    """The forward pass inside, over a padded batch or its ``packed`` tokens, replays the routes of its tokens.

    routes_BTLK  integers, -1 where the model's own router chooses
    Raises       ShapeError for routes that do not fit the batch or the model
    """
    routers = Routers.of(model)
    last = max(routers.layers, default=routes_BTLK.shape[2])
    if routes_BTLK.shape[:2] != attention_BT.shape or routes_BTLK.shape[2] <= last:
        raise ShapeError(
            f"routing replay: routes must be [B, T, layers, experts per token] of the tokens {list(attention_BT.shape)}"
            f" and of {type(model).__name__}, whose last router is in layer {last if routers.count else 'none'}: got "
            f"{list(routes_BTLK.shape)}; they come from another model, or from other tokens."
        )
    # The batch holds no real routes for padding, so the model routes it by itself.
    routes_BTLK = routes_BTLK.masked_fill(~attention_BT.bool()[..., None, None], -1)
    if (split := active_split()) is not None:
        padding = -routes_BTLK.shape[1] % split.size
        routes_BTLK = split.cut(pad(routes_BTLK, (0, 0, 0, 0, 0, padding), value=-1))
    routes_NLK = routes_BTLK.flatten(0, 1)
    if packed is not None:
        routes_NLK = routes_NLK.new_full((packed.input_ids.numel(), *routes_NLK.shape[1:]), -1)
        routes_NLK[packed.index] = routes_BTLK[attention_BT.bool()]
    with same_routes(routes_NLK):
        yield


class _ChosenExperts(TorchFunctionMode):
    """Makes a router's ``topk`` over its experts return the given routes; -1 keeps the router's own choice.

    The router's own code before and after ``topk`` thus computes the gates. ``count``: number of replaced calls.
    """

    def __init__(self, routes_NK: Tensor) -> None:
        super().__init__()
        self.routes_NK, self.count = routes_NK, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or found.indices.shape != self.routes_NK.shape:
            return found
        self.count += 1
        indices_NK = torch.where(self.routes_NK < 0, found.indices, self.routes_NK)
        return torch.return_types.topk((args[0].gather(-1, indices_NK), indices_NK))


def _route(module: nn.Module, arguments: Any, routes_NK: Tensor) -> Any:
    """The output of a router made to send its tokens to these experts. Raises ShapeError if it cannot be made to."""
    with _ChosenExperts(routes_NK) as chosen:
        output = module.forward(*arguments)
    if chosen.count != 1:
        raise ShapeError(
            f"routing replay: {type(module).__name__} must choose its experts by one topk over [positions, experts], "
            f"here of {list(routes_NK.shape)}: it made {chosen.count} such calls; use rollout.routing_replay=off."
        )
    return output


def why_not_replayed(model: nn.Module) -> str | None:
    """The reason that routes cannot be replayed in ``model``; None if they can. ``model`` needs no weights.

    Calls  a router of its kind with random weights on a few tokens: it must return the experts that are replayed, with
           gates that are neither 0 nor infinite; replaying its own choices must not change its output

    >>> from llmrl.testing import tiny_model
    >>> why_not_replayed(tiny_model(architecture="qwen3_moe")), why_not_replayed(tiny_model())
    (None, 'it is not a mixture of experts')
    """
    if not (modules := router_modules(model)):
        return "it is not a mixture of experts"
    # A copy of one router, on the CPU: a run's plan calls this before any weights are loaded.
    router = copy.deepcopy(modules[0]).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(std=0.02, generator=generator)  # a usual initialisation: no gate underflows
    width = next((tensor.shape[-1] for tensor in router.parameters() if tensor.ndim == 2), 1)
    hidden = torch.randn(32, width, generator=generator)
    try:
        with torch.no_grad():
            own = _tensors(router(hidden))
            chosen = next((part for part in own if not part.is_floating_point()), None)
            if chosen is None:
                return f"its router ({type(router).__name__}) does not return the experts that it chooses"
            same = _tensors(_route(router, (hidden,), chosen))
            asked = getattr(router, "num_experts", None) or max(part.shape[-1] for part in own)
            asked = asked - 1 - chosen  # other experts than the router's own
            other = _tensors(_route(router, (hidden,), asked))
    except Exception as error:  # third-party code: any error means that replay does not work
        return f"its router ({type(router).__name__}) fails: {type(error).__name__}: {error}"
    gates = [part for part in other if part.is_floating_point() and part.shape == asked.shape]
    right = all(torch.equal(*pair) for pair in zip(own, same, strict=True))
    right &= any(torch.equal(part, asked) for part in other if not part.is_floating_point())
    right &= bool(gates) and all(bool(gate.isfinite().all() and (gate != 0).all()) for gate in gates)
    return None if right else f"its router ({type(router).__name__}) has no gates for experts that it does not choose"
