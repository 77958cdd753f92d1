"""Log-probabilities of chosen tokens under a causal language model, without a ``[B, T, V]`` tensor of logits.

The model's body runs once over the batch. The output head then runs over the *selected* positions only, a chunk at a
time; each chunk's logits are discarded and recomputed in the backward pass, so neither pass holds the logits of the
whole batch. The matrix product runs in the model's dtype, everything after it in float32.

Where padding would be much of the work, the body gets packs instead (see ``packing``), with the same results.

Shapes: B sequences, T tokens, V vocabulary, H hidden size, N selected tokens of the batch, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.packing import (
    HeadPath,
    Packing,
    accepted,
    find_head_path,
    has_varlen_attention,
    map_logits,
    pack_batch,
    padded_inputs,
    reduction_dtype,
)
from llmrl.modules.llm.sequence_split import SequenceSplit, active_split
from llmrl.modules.llm.shared_prefixes import can_share_prefixes, share_prefixes
from llmrl.modules.llm.vision import Media, has_images, media_inputs, only_given_images, reach_vision_tower

__all__ = ["TokenScorer", "TokenScores", "hidden_before", "token_logprobs", "with_predecessor"]


class TokenScores(NamedTuple):
    """Scores of the selected tokens of a padded batch; 0 (False) where a token was not selected.

    ``log_probs``  float32[B, T]          log p(token t | tokens before t), with grad
    ``entropy``    float32[B, T] or None  entropy of the distribution that token t was drawn from, with grad
    ``top1``       bool[B, T] or None     token t is the most likely one
    ``own``        float32[B, T] or None  what ``head`` measured beside them, see `token_logprobs`
    """

    log_probs: Tensor
    entropy: Tensor | None
    top1: Tensor | None = None
    own: Tensor | None = None


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    position_ids: Tensor | None = None,
    packing: Packing = "off",
    media: Sequence[Media] | None = None,
    routes: Tensor | None = None,
    head: HeadFunction | None = None,
) -> TokenScores:
    """Scores the selected tokens of a padded batch, left- or right-padded.

    Reads    input_ids int64[B, T], attention_mask bool or int[B, T] (true on real tokens), select bool[B, T]
    Returns  TokenScores, float32 (float64 for a float64 model); a selected token that has no predecessor scores 0
    Calls    the model's body and output head by keyword, without a cache; positions are counted from the mask.
             If head(body) does not equal the model's logits: the whole model, a few rows at a time
    Raises   ShapeError if the three tensors differ in shape, ConfigError for a temperature or chunk not above 0, for
             packing="on" with position_ids or with a model that cannot be packed

    chunk    number of tokens whose logits exist at a time; the default depends on the vocabulary size
    packing  lays the rows end to end, with the same result up to rounding; "auto": only if the model supports it
             (`why_not_packed`) and at least a fifth of the tokens is saved
    media    image tensors of each row (``llmrl.modules.llm.vision``); a batch with images is not packed, and the model
             computes its own positions
    routes   int16[B, T, layers, K]: experts to replay for each token, -1 where the model's routers choose; ignored for
             batches with images (``llmrl.modules.llm.routers``)
    head     in place of `score_hidden`: what is computed from the hidden states; needs a model that is head(body)

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=2)
    >>> model = Qwen2ForCausalLM(config)
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> response = torch.tensor([[False, False, True, True]])
    >>> token_logprobs(model, ids, torch.ones_like(ids), response).log_probs.lt(0).tolist()
    [[False, False, True, True]]
    """
    if not (input_ids.shape == attention_mask.shape == select.shape) or input_ids.ndim != 2:
        raise ShapeError(
            "token_logprobs: input_ids, attention_mask and select must have one shape [B, T]: got "
            f"{tuple(input_ids.shape)}, {tuple(attention_mask.shape)} and {tuple(select.shape)}."
        )
    if not temperature > 0:
        raise ConfigError(
            f"token_logprobs: temperature must be above 0, got {temperature}; greedy decoding has no distribution, "
            "score its tokens at temperature 1."
        )
    if chunk is not None and chunk < 1:
        raise ConfigError(f"token_logprobs: chunk counts tokens and must be at least 1, got {chunk}.")
    options = HeadOptions(temperature, chunk, entropy, head)
    arguments = (input_ids, attention_mask, select, options, position_ids, packing, media, routes)
    # Body and head are called separately, which bypasses the model's forward, so a sharded model is gathered first.
    return model.call_whole(_score, *arguments) if hasattr(model, "call_whole") else _score(model, *arguments)


class HeadOptions(NamedTuple):
    """The options of `token_logprobs` that concern the head."""

    temperature: float
    chunk: int | None
    entropy: bool
    function: HeadFunction | None = None


HeadFunction = Callable[[HeadPath, Tensor, Tensor, HeadOptions], tuple[Tensor | None, ...]]
"""Hidden states [N, H] and the ids [N] that they predict, to the fields of `TokenScores`, [N] each or None."""


def _score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    options: HeadOptions,
    position_ids: Tensor | None,
    packing: Packing,
    media: Sequence[Media] | None,
    routes: Tensor | None,
) -> TokenScores:
    scored_BT = with_predecessor(select, attention_mask)
    path = find_head_path(model)
    if path is None and options.function is not None:
        raise ConfigError(
            f"token_logprobs: {type(model).__name__} must compute its logits as head(body) for what is computed from "
            "its hidden states: it does not."
        )
    replay: Callable[[], AbstractContextManager[None]] = nullcontext
    if routes is not None:
        from llmrl.modules.llm.routers import replaying

        replay = partial(replaying, model, routes, attention_mask)
    inputs = padded_inputs(input_ids, attention_mask, position_ids)
    if has_images(media):
        # No position ids: an image's positions count its rows and columns, and the model computes those itself.
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **media_inputs(attention_mask, media)}
        with only_given_images(model, inputs) as inputs:
            if path is None:  # in one piece: all images are concatenated, so they cannot be split by row
                found = _score_with_whole_model(model, inputs, scored_BT, options, rows=len(input_ids))
            else:
                found = _from_hidden(path, hidden_before(path, inputs, scored_BT), input_ids[scored_BT], options)
    elif (split := active_split()) is not None:
        with replay():
            return _score_slice(model, path, inputs, scored_BT, options, split)
    else:
        batch = (model, input_ids, attention_mask.bool(), packing)
        # Replayed experts are given for each token of each row.
        packed = share_prefixes(*batch) if position_ids is None and routes is None and path is not None else None
        packed = packed or pack_batch(*batch, has_positions=position_ids is not None)
        if path is None:
            found = _score_with_whole_model(model, inputs, scored_BT, options)
        elif packed is None:
            _tell_routers(model, attention_mask.bool())
            with replay():
                hidden_NH = hidden_before(path, inputs, scored_BT)
            found = _from_hidden(path, hidden_NH, input_ids[scored_BT], options)
        else:
            _tell_routers(model, packed.segment_ids >= 0)
            with replay(packed), packed.attending():
                hidden_PSH = path.body(**accepted(path.body, packed.inputs(model))).last_hidden_state
            before_N = packed.index.roll(1)[scored_BT[attention_mask.bool()]]  # the predecessor, in the same row
            found = _from_hidden(path, hidden_PSH.flatten(0, 1)[before_N], input_ids[scored_BT], options)
    scores = _in_place(found, scored_BT)
    return scores._replace(log_probs=reach_vision_tower(model, scores.log_probs))


def _score_slice(
    model: nn.Module,
    path: HeadPath | None,
    inputs: dict[str, Tensor],
    scored_BT: Tensor,
    options: HeadOptions,
    split: SequenceSplit,
) -> TokenScores:
    """Scores a batch on all ranks of ``split``, each from its slice of the hidden states; see `SequenceSplit`."""
    if path is None:
        raise ConfigError(
            f"token_logprobs: {type(model).__name__} must compute its logits as head(body) for sequences to be split "
            "over ranks: it does not; use parallel.context=1."
        )
    ids_BT, attention_BT, position_BT = (split.widen(value.long()) for value in inputs.values())
    split.width = ids_BT.shape[1]
    local = {"input_ids": split.cut(ids_BT)}
    if bool((attention_BT[:, 1:] <= attention_BT[:, :-1]).all()):  # right padding: no token attends to it
        position_BT = torch.arange(split.width, device=ids_BT.device).expand_as(ids_BT)
    else:
        local["attention_mask"] = attention_BT
    local["position_ids"] = split.cut(position_BT)  # positions in the whole sequence, not in the slice
    _tell_routers(model, split.cut(attention_BT).bool())
    hidden_BSH = path.body(**accepted(path.body, local)).last_hidden_state
    # A token's hidden state predicts the next token, which may be the first of the next slice.
    target_BS = split.cut(ids_BT.roll(-1, dims=1))
    next_BS = split.cut(split.widen(scored_BT.long()).roll(-1, dims=1)).bool()
    scores = _in_place(_from_hidden(path, hidden_BSH[next_BS], target_BS[next_BS], options), next_BS)

    def join(value_BS: Tensor) -> Tensor:
        return split.join(value_BS).roll(1, dims=1)[:, : scored_BT.shape[1]]

    # Every rank needs the scores of all tokens, for losses over whole sequences.
    entropy_BT = None if scores.entropy is None else join(scores.entropy)
    own_BT = None if scores.own is None else join(scores.own)
    return TokenScores(join(scores.log_probs), entropy_BT, join(scores.top1.float()).bool(), own_BT)


def _tell_routers(model: nn.Module, is_real: Tensor) -> None:
    """Tells the model's `Routers` which positions of the next pass are tokens."""
    if (routers := getattr(model, "routers", None)) is not None:
        routers.is_real = is_real.flatten()


def hidden_before(path: HeadPath, inputs: dict[str, Tensor], scored_BT: Tensor) -> Tensor:
    """The hidden states [N, H] that predict the scored tokens of a padded batch."""
    hidden_BTH = path.body(**accepted(path.body, inputs)).last_hidden_state
    return hidden_BTH[:, :-1][scored_BT[:, 1:]]


def with_predecessor(select: Tensor, attention_mask: Tensor) -> Tensor:
    """bool[B, T]: the selected real tokens that follow another token of their row.

    The first token of a row has no log-prob, as nothing precedes it, and must not count in a mean of log-probs.

    >>> with_predecessor(torch.tensor([[True, True, True]]), torch.tensor([[0, 1, 1]]))
    tensor([[False, False,  True]])
    """
    attended_BT = attention_mask.bool()
    scored_BT = select.bool() & attended_BT
    scored_BT[:, 1:] &= attended_BT[:, :-1]
    scored_BT[:, :1] = False
    return scored_BT


class TokenScorer(nn.Module):
    """``token_logprobs`` as a module for DDP and FSDP2 to wrap: every parameter is used inside its ``forward``.

    Reads    input_ids int64[B, T], attention_mask bool[B, T], select bool[B, T]
    Returns  TokenScores; a batch without any selected token still reaches every parameter, with zero gradients
    Calls    the model a few times on a few tokens at construction, to test whether it returns head(body) and whether
             it can be packed

    ``.model`` is the language model itself. A loss takes the scorer as its ``actor_network``: ``token_scores`` is the
    same call at the scorer's own ``temperature``. A call with position ids is not packed, unless it sets ``packing``.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, chunk: int | None = None, packing: Packing = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        if not any(parameter.is_meta for parameter in model.parameters()):
            find_head_path(model)  # now, not between the collectives of the first sharded step
        self.use_packing(packing)

    def use_packing(self, packing: Packing) -> None:
        """Sets ``packing`` for the following calls; see ``token_logprobs``.

        Raises  ConfigError for "on" if the model cannot be packed (flash-attention: at the first call, on its GPU)
        """
        if not has_varlen_attention(self.model) and not any(parameter.is_meta for parameter in self.model.parameters()):
            can_share_prefixes(self.model, packing)
        self.packing: Packing = packing

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        select: Tensor,
        temperature: float | None = None,
        *,
        packing: Packing | None = None,
        **options: Any,
    ) -> TokenScores:
        """Calls `token_logprobs`; keywords given here override the scorer's own settings."""
        temperature = self.temperature if temperature is None else temperature
        packing = packing or ("off" if options.get("position_ids") is not None else self.packing)
        options = {"temperature": temperature, "chunk": self.chunk, "packing": packing, **options}
        return token_logprobs(self.model, input_ids, attention_mask, select, **options)

    def token_scores(self, *batch: Tensor, **options: Any) -> TokenScores:
        return self(*batch, **options)  # not `forward` itself: the hooks of a sharded module run around a call


# ------------------------------------------------------------------------------------------------- scores from hidden

_Scores = tuple[Tensor, Tensor | None, Tensor]  # [N] each: log-probs, entropies, top-1 hits


def _from_hidden(path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions) -> tuple[Any, ...]:
    return (options.function or score_hidden)(path, hidden_NH, targets_N, options)


def score_hidden(path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions) -> _Scores:
    """Log-probs, entropies and top-1 hits of the targets, [N] each, a chunk of logits at a time."""
    if (plain := plain_head(path, hidden_NH, options)) is not None:
        return _HeadScores.apply(hidden_NH, plain.weight, plain.bias, targets_N, plain.spec)

    # Any other head (LoRA, quantised, sharded) is called as a module; checkpointing recomputes its logits.
    head = head_module(path.head)

    def score(hidden_CH: Tensor, targets_C: Tensor) -> _Scores:
        return _score_logits(map_logits(head(hidden_CH), path, options.temperature), targets_C, options.entropy)

    # A wrapped head may not expose its vocabulary size: assume a large one, 2^17.
    size = options.chunk or chunk_rows(getattr(head, "out_features", 0) or 1 << 17, hidden_NH.device.type)
    pieces = [
        checkpoint(score, hidden_CH, targets_C, use_reentrant=False)
        for hidden_CH, targets_C in zip(hidden_NH.split(size), targets_N.split(size), strict=True)
    ]
    return _concatenate(pieces)


class PlainHead(NamedTuple):
    """A linear layer that is applied to chunks of hidden states."""

    weight: Tensor
    bias: Tensor | None
    spec: HeadSpec


def plain_head(path: HeadPath, hidden_NH: Tensor, options: HeadOptions) -> PlainHead | None:
    """The head as weight and bias, with its precision and chunks for such hidden states; None for any other module."""
    head = head_module(path.head)
    plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
    if not plain or type(head.weight) not in (Tensor, nn.Parameter):
        return None
    device_type = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else head.weight.dtype
    dtype = torch.float32 if getattr(path.head, "in_float32", False) else dtype  # see model_options.float32_head
    options = options._replace(chunk=options.chunk or chunk_rows(head.weight.shape[0], device_type))
    return PlainHead(head.weight, head.bias, HeadSpec(dtype, path, options))


def head_module(head: nn.Module) -> nn.Module:
    """The layer that computes: of a head that peft trains in full the active copy; any other head itself."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    active = [] if head.disable_adapters else head.active_adapters
    return copies[active[0]] if active else head.original_module


def _score_with_whole_model(
    model: nn.Module, inputs: dict[str, Tensor], scored_BT: Tensor, options: HeadOptions, rows: int = 0
) -> _Scores:
    def score(rows: dict[str, Tensor], scored: Tensor) -> _Scores:
        output = model(**accepted(model, rows))
        logits = getattr(output, "logits", output)[:, :-1][scored[:, 1:]]
        logits = map_logits(logits, None, options.temperature)
        return _score_logits(logits, rows["input_ids"][scored], options.entropy)

    num_tokens = scored_BT.shape[1]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1 << 17
    size = rows or max(1, chunk_rows(vocabulary, scored_BT.device.type) // max(num_tokens, 1))
    pieces = []
    for start in range(0, scored_BT.shape[0], size):
        part = slice(start, start + size)
        own = inputs if rows else {key: value[part] for key, value in inputs.items()}
        pieces.append(checkpoint(score, own, scored_BT[part], use_reentrant=False))
    return _concatenate(pieces)


def _concatenate(pieces: list[_Scores]) -> _Scores:
    log_probs, entropies, top1 = zip(*pieces, strict=True)
    return torch.cat(log_probs), None if entropies[0] is None else torch.cat(entropies), torch.cat(top1)


def _score_logits(logits_CV: Tensor, targets_C: Tensor, entropy: bool) -> _Scores:
    # Differentiated by autograd; the callers' `checkpoint` recomputes the logits in the backward pass.
    log_p_CV = logits_CV.log_softmax(-1)
    log_prob_C = log_p_CV.gather(1, targets_C[:, None]).squeeze(1)
    entropy_C = -(log_p_CV.exp() * log_p_CV).sum(-1) if entropy else None
    return log_prob_C, entropy_C, log_prob_C.detach() >= log_p_CV.detach().amax(-1)


def _in_place(scores: tuple[Tensor | None, ...], scored_BT: Tensor) -> TokenScores:
    """Scatters one value per scored token to [B, T], 0 elsewhere."""
    placed = (
        None if value_N is None else value_N.new_zeros(scored_BT.shape).masked_scatter(scored_BT, value_N)
        for value_N in scores
    )
    return TokenScores(*placed)


def chunk_rows(vocabulary: int, device_type: str) -> int:
    """Tokens per chunk: 32 MB of float32 logits on a CPU, 512 MB on an accelerator; 64 to 1024 tokens."""
    budget = 1 << 23 if device_type == "cpu" else 1 << 27
    return max(64, min(1024, budget // vocabulary))


# ------------------------------------------------------------------------------------ the chunked head, with recompute


class HeadSpec(NamedTuple):
    """How a head computes logits: the precision of the matrix product, what follows it, and the size of a chunk."""

    dtype: torch.dtype
    path: HeadPath
    options: HeadOptions  # with the chunk


class HeadGradients:
    """The gradients of hidden states, weight and bias, summed over chunks from those of the logits."""

    def __init__(self, ctx: FunctionCtx, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, spec: HeadSpec):
        values = zip((hidden_NH, weight_VH, bias_V), ctx.needs_input_grad[:3], strict=True)
        self.hidden_NH, self.weight_VH, self.bias_V = (torch.zeros_like(v) if needed else None for v, needed in values)
        self._hidden_NH, self.cast_VH, self._dtype = hidden_NH, weight_VH.to(spec.dtype), spec.dtype

    def add(self, part: slice, grad_CV: Tensor, slope_CV: Tensor | float | None) -> None:
        """``grad_CV`` of the logits of ``part``, which may be overwritten, and d logits / d head output."""
        grad_CV = (grad_CV.mul_(slope_CV) if slope_CV is not None else grad_CV).to(self._dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[part] = (grad_CV @ self.cast_VH).to(self.hidden_NH.dtype)
        if self.weight_VH is not None:
            hidden_CH = self._hidden_NH[part].to(self._dtype)
            if self.weight_VH.dtype == self._dtype:  # without a temporary of the weight's size
                self.weight_VH.addmm_(grad_CV.T, hidden_CH)
            else:
                self.weight_VH += grad_CV.T @ hidden_CH
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)


class _HeadScores(torch.autograd.Function):
    """Log-probs, entropies and top-1 hits of N tokens from their hidden states; holds one chunk of logits at a time.

    With x the logits, p = softmax(x), y the target and H the entropy:
    d log p_y / dx = onehot(y) - p,   dH / dx = -p (log p + H).
    Saved for backward: the inputs and two floats per token (log-sum-exp and entropy).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: HeadSpec,
    ) -> _Scores:
        dtype = reduction_dtype(spec.dtype)
        log_prob_N = hidden_NH.new_empty(targets_N.shape, dtype=dtype)
        log_sum_N = torch.empty_like(log_prob_N)
        entropy_N = torch.empty_like(log_prob_N) if spec.options.entropy else None
        top1_N = torch.empty_like(targets_N, dtype=torch.bool)
        for part, logits_CV, _ in chunks_of_logits(hidden_NH, weight_VH, bias_V, spec):
            target_C = logits_CV.gather(1, targets_N[part, None]).squeeze(1)
            max_C = logits_CV.amax(-1)  # subtracted so that no exponential overflows
            top1_N[part] = target_C >= max_C
            logits_CV.sub_(max_C[:, None])
            if entropy_N is None:
                log_norm_C = logits_CV.exp_().sum(-1).log_()
            else:
                weight_CV = logits_CV.exp()
                norm_C = weight_CV.sum(-1)
                log_norm_C = norm_C.log()
                # H = log Z - E[x]. A batched matrix product computes the mean without a third [C, V] tensor.
                entropy_N[part] = log_norm_C - torch.bmm(weight_CV[:, None], logits_CV[:, :, None]).view(-1) / norm_C
            log_sum_N[part] = max_C + log_norm_C
            log_prob_N[part] = target_C - max_C - log_norm_C
        ctx.spec = spec
        ctx.set_materialize_grads(False)  # a missing gradient arrives as None, and its part is skipped
        ctx.mark_non_differentiable(top1_N)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sum_N, entropy_N)
        return log_prob_N, entropy_N, top1_N

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None, _: None) -> tuple:
        hidden_NH, weight_VH, bias_V, targets_N, log_sum_N, entropy_N = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        gradients = HeadGradients(ctx, hidden_NH, weight_VH, bias_V, spec)
        if grad_log_prob_N is None:
            grad_log_prob_N = torch.zeros_like(log_sum_N)
        for part, logits_CV, slope_CV in chunks_of_logits(hidden_NH, gradients.cast_VH, bias_V, spec, with_slope=True):
            grad_C1 = grad_log_prob_N[part, None]
            # d loss / dx = g_y (onehot(y) - p) - g_H p (log p + H), in the memory of the logits
            log_p_CV = logits_CV.sub_(log_sum_N[part, None])
            if grad_entropy_N is None:
                grad_CV = log_p_CV.exp_().mul_(-grad_C1)
            else:
                p_CV = log_p_CV.exp()
                grad_CV = (
                    log_p_CV.add_(entropy_N[part, None]).mul_(-grad_entropy_N[part, None]).sub_(grad_C1).mul_(p_CV)
                )
                del p_CV
            grad_CV.scatter_add_(1, targets_N[part, None], grad_C1)
            gradients.add(part, grad_CV, slope_CV)
        return gradients.hidden_NH, gradients.weight_VH, gradients.bias_V, None, None


def chunks_of_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, spec: HeadSpec, *, with_slope: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor | float | None]]:
    """Yields (rows, logits[C, V], d logits / d head output); the consumer may overwrite the logits."""
    path, temperature, chunk = spec.path, spec.options.temperature, spec.options.chunk
    weight_VH = weight_VH.to(spec.dtype)
    bias_V = None if bias_V is None else bias_V.to(spec.dtype)
    for start in range(0, hidden_NH.shape[0], chunk):
        part = slice(start, min(start + chunk, hidden_NH.shape[0]))
        with torch.autocast(hidden_NH.device.type, enabled=False):  # autocast would override the spec's dtype
            logits_CV = F.linear(hidden_NH[part].to(spec.dtype), weight_VH, bias_V).to(reduction_dtype(spec.dtype))
        slope: Tensor | float | None = None
        factor = path.scale / temperature
        if path.softcap is None:
            if factor != 1.0:
                logits_CV.mul_(factor)
                slope = factor
        else:
            logits_CV.mul_(path.scale / path.softcap).tanh_()
            if with_slope:  # d tanh(u) = 1 - tanh(u)^2
                slope = logits_CV.square().neg_().add_(1.0).mul_(factor)
            logits_CV.mul_(path.softcap / temperature)
        yield part, logits_CV, slope
