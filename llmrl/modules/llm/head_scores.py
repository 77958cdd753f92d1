"""The output head over hidden states: log-probs and entropies of tokens, a chunk of logits at a time.

Each chunk's logits are discarded and recomputed in the backward pass. The matrix product runs in the head's dtype,
everything after it in float32.

Shapes: V vocabulary, H hidden size, N tokens, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llmrl.modules.llm.packing import HeadPath, map_logits, reduction_dtype

Scores = tuple[Tensor, Tensor | None, Tensor]  # [N] each: log-probs, entropies, top-1 hits


class HeadOptions(NamedTuple):
    """The options of `token_logprobs` that concern the head."""

    temperature: float
    chunk: int | None
    entropy: bool
    function: HeadFunction | None = None


HeadFunction = Callable[[HeadPath, Tensor, Tensor, HeadOptions], tuple[Tensor | None, ...]]
"""Hidden states [N, H] and the ids [N] that they predict, to the fields of `TokenScores`, [N] each or None."""


def score_hidden(path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions) -> Scores:
    """Log-probs, entropies and top-1 hits of the targets, [N] each, a chunk of logits at a time."""
    if (plain := plain_head(path, hidden_NH, options)) is not None:
        return _HeadScores.apply(hidden_NH, plain.weight, plain.bias, targets_N, plain.spec)

    # Any other head (LoRA, quantised, sharded) is called as a module; checkpointing recomputes its logits.
    head = head_module(path.head)

    def score(hidden_CH: Tensor, targets_C: Tensor) -> Scores:
        return score_logits(map_logits(head(hidden_CH), path, options.temperature), targets_C, options.entropy)

    # A wrapped head may not expose its vocabulary size: assume a large one, 2^17.
    size = options.chunk or chunk_rows(getattr(head, "out_features", 0) or 1 << 17, hidden_NH.device.type)
    pieces = [
        checkpoint(score, hidden_CH, targets_C, use_reentrant=False)
        for hidden_CH, targets_C in zip(hidden_NH.split(size), targets_N.split(size), strict=True)
    ]
    return concatenate(pieces)


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


def concatenate(pieces: list[Scores]) -> Scores:
    log_probs, entropies, top1 = zip(*pieces, strict=True)
    return torch.cat(log_probs), None if entropies[0] is None else torch.cat(entropies), torch.cat(top1)


def score_logits(logits_CV: Tensor, targets_C: Tensor, entropy: bool) -> Scores:
    # Differentiated by autograd; the callers' `checkpoint` recomputes the logits in the backward pass.
    log_p_CV = logits_CV.log_softmax(-1)
    log_prob_C = log_p_CV.gather(1, targets_C[:, None]).squeeze(1)
    entropy_C = -(log_p_CV.exp() * log_p_CV).sum(-1) if entropy else None
    return log_prob_C, entropy_C, log_prob_C.detach() >= log_p_CV.detach().amax(-1)


def chunk_rows(vocabulary: int, device_type: str) -> int:
    """Tokens per chunk: 32 MB of float32 logits on a CPU, 512 MB on an accelerator; 64 to 1024 tokens."""
    budget = 1 << 23 if device_type == "cpu" else 1 << 27
    return max(64, min(1024, budget // vocabulary))


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
    ) -> Scores:
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
