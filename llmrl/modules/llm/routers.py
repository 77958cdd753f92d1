"""Routers of a mixture of experts: records what they decide, for the loss that balances the load of the experts.

A router scores all experts for each token and sends the token to a few of them. Which positions of a forward pass are
tokens, and not padding, is known where the pass is laid out: `token_logprobs` writes it to the model's `Routers`.

Shapes: R routers, N positions of a forward pass, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.modules.llm.packing import find_head_path

__all__ = ["RouterLoad", "Routers", "router_modules"]


class RouterLoad(NamedTuple):
    """The routers' choices for the tokens of a batch; sums, so that those of parts add up.

    ``chosen_RE``  float32  tokens that each router sent to each expert
    ``probs_RE``   float32  probabilities that it gave, added up over the tokens, with grad
    ``tokens``     float32  their number
    """

    chosen_RE: Tensor
    probs_RE: Tensor
    tokens: Tensor


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
    """The routers of ``model``, which gets this object as its attribute ``routers``; ``count`` is 0 where it is dense.

    ``is_real``  bool[N], the positions of the forward pass that are tokens; written by ``token_logprobs``
    Raises       ConfigError for a model whose head cannot be called apart from its body
    """

    def __init__(self, model: nn.Module) -> None:
        modules = router_modules(model)  # not kept: they have hooks that know this object
        self.count = len(modules)
        self.is_real: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, Tensor]] | None = None
        if not modules:
            return
        if find_head_path(model) is None:
            raise ConfigError(
                f"routers: {type(model).__name__} must give its logits as head(body): its experts cannot be balanced "
                "otherwise; use model_options.router_aux_loss=0."
            )
        for number, module in enumerate(modules):
            module.register_forward_hook(partial(self._see, number))
        model.routers = self

    def _see(self, number: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._seen is None:  # also where checkpointing computes a layer again: it saves the same tensors then
            return
        parts = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)]
        indices = next((part for part in parts if not part.is_floating_point()), None)
        count = getattr(module, "num_experts", None) or parts[0].shape[-1]
        logits = next(part for part in parts if part.is_floating_point() and part.shape[-1] == count).flatten(0, -2)
        if indices is None:
            indices = logits.topk(module.top_k, dim=-1).indices
        self._seen[number] = (logits, indices.reshape(len(logits), -1))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes inside; `load` is that of the last one."""
        self._seen = {}
        try:
            yield
        finally:
            self._last, self._seen = self._seen, None

    def load(self) -> RouterLoad:
        """Of the last forward pass that was recorded, over its tokens alone."""
        chosen, probs = [], []
        real = self.is_real.float()
        for _, (logits_NE, indices_NK) in sorted(self._last.items()):
            weight_NE = real[:, None].expand_as(logits_NE)
            chosen.append(torch.zeros_like(weight_NE).scatter_(1, indices_NK, 1.0).mul_(weight_NE).sum(0))
            probs.append((logits_NE.float().softmax(-1) * weight_NE).sum(0))
        self._last = {}
        return RouterLoad(torch.stack(chosen), torch.stack(probs), real.sum())
