"""Sequence parallelism: each rank computes a slice of every sequence, and in attention a share of the heads.

All layers but attention process one token at a time, so a slice is enough for them. Attention needs the whole sequence
of a head. Before it, the ranks exchange their slices of all heads for whole sequences of their own heads; after it,
they exchange back (the all-to-all of DeepSpeed-Ulysses, arXiv:2309.14509). The attention is Transformers' "sdpa".

Shapes: B sequences, T tokens, n ranks, S = T / n tokens of a slice, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

_NAME = "sdpa_of_split_sequences"  # the name of the attention implementation
_active: SequenceSplit | None = None  # a global, because autograd recomputes checkpointed layers in other threads


class SequenceSplit:
    """The ranks of ``group``, which all get the same batch while the split is `active`; otherwise nothing changes.

    Every rank gets the scores of all tokens, but only the gradients of its own slice: their sum over the ranks is the
    gradient of the loss.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.width = 0  # T of the current pass, a multiple of n

    def prepare(self, model: nn.Module) -> None:
        """Makes the attention of ``model`` accept slices; see `why_not_split`."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, _mask)
        model.set_attn_implementation(_NAME)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Splits the forward and backward passes inside, which all ranks of the group run on the same batch."""
        global _active
        _active = self
        try:
            yield
        finally:
            _active = None

    def cut(self, value_BT: Tensor) -> Tensor:
        """This rank's slice [B, S] of values that `widen` padded to a multiple of n."""
        return value_BT.chunk(self.size, dim=1)[self.rank]

    def widen(self, value_BT: Tensor) -> Tensor:
        """Pads [B, T] with zeros on the right, to a multiple of n."""
        return F.pad(value_BT, (0, -value_BT.shape[1] % self.size))

    def join(self, value_BS: Tensor) -> Tensor:
        """Gathers [B, T] from all ranks. Backward keeps only this rank's slice, since all ranks have the same loss."""
        return _Join.apply(value_BS, self)


def active_split() -> SequenceSplit | None:
    """The split that is active in this pass; None if sequences are whole."""
    return _active


def why_not_split(model: nn.Module, size: int) -> str | None:
    """The reason that sequences of ``model`` cannot be split over ``size`` ranks; None if they can."""
    config = model.config
    sizes = config.get_text_config()
    heads = sizes.num_attention_heads
    key_heads = getattr(sizes, "num_key_value_heads", None) or heads
    kinds = set(getattr(sizes, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    attention = getattr(config, "_attn_implementation", None)
    if sizes is not config:
        return "it reads more than text"
    if kinds or not getattr(model, "_supports_attention_backend", False):
        return f"it has layers that mix tokens in another way ({', '.join(sorted(kinds)) or type(model).__name__})"
    if attention not in ("sdpa", _NAME):
        return f"its attention is {attention}, not sdpa"
    if not can_share_heads(heads, key_heads, size):
        return f"its {heads} attention heads and {key_heads} key/value heads cannot be shared by {size} ranks"
    return None


def can_share_heads(heads: int, key_heads: int, size: int) -> bool:
    """True if ``size`` ranks can have equally many attention heads each, with the key/value heads that these need."""
    return not heads % size and not (key_heads % size and size % key_heads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value_BS: Tensor, split: SequenceSplit) -> Tensor:
        ctx.split = split
        slices = [torch.empty_like(value_BS, memory_format=torch.contiguous_format) for _ in range(split.size)]
        dist.all_gather(slices, value_BS.contiguous(), group=split.group)
        return torch.cat(slices, dim=1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_BT: Tensor) -> tuple[Tensor, None]:
        return ctx.split.cut(grad_BT), None


class _Exchange(torch.autograd.Function):
    """Sends part i of the first dimension to rank i and receives rank i's part in its place; so does its backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


def _swapped(value: Tensor, split: SequenceSplit) -> Tensor:
    """[B, H, S, D] of this rank's slice -> [B, H / n, T, D] of its heads; [B, T, H / n, D] -> [B, S, H, D].

    Fewer than n key/value heads are repeated first.
    """
    if value.shape[1] < split.size:
        value = value.repeat_interleave(split.size // value.shape[1], dim=1)
    parts = _Exchange.apply(torch.stack(value.chunk(split.size, dim=1)), split.group)
    return torch.cat(parts.unbind(0), dim=2)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    split = _active
    if split is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    query, key, value = (_swapped(each, split) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    # The exchange may change the number of query heads per key/value head; sdpa reads it from the layer.
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
    output, _ = sdpa_attention_forward(layer, query, key, value, attention_mask, **options)
    return _swapped(output, split), None


def _mask(*, q_length: int, kv_length: int, q_offset: int = 0, **options: Any) -> Tensor | None:
    """Transformers' mask for whole sequences, which heads see after the exchange; includes sliding windows."""
    from transformers.masking_utils import sdpa_mask

    if _active is not None:
        q_length = kv_length = _active.width
    return sdpa_mask(q_length=q_length, kv_length=kv_length, q_offset=q_offset, **options)
