"""Attention of packed rows one row at a time, for devices without a kernel for rows of several lengths.

With a mask, attention computes all pairs of a pack's tokens, so a pack is only as wide as its longest row and has
filling at its end. Here `scaled_dot_product_attention` is called for each row, with the causal mask of its kernel: a
single pack then holds all rows, without filling, and only pairs within a row are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from llmrl.errors import ShapeError

_active: ContextVar[Sequence[int] | None] = ContextVar("lengths of the rows", default=None)


def active_rows() -> Sequence[int] | None:
    """The lengths of the rows that are kept apart in this pass; `rows_apart` sets them again for a recomputed part."""
    return _active.get()


@contextmanager
def rows_apart(lengths: Sequence[int]) -> Iterator[None]:
    """Forward passes inside are over one pack, of rows of these lengths, each of which attends to itself alone."""
    token = _active.set(lengths)
    try:
        with _RowByRow(lengths):
            yield
    finally:
        _active.reset(token)


def no_mask(num_tokens: int, device: torch.device) -> Tensor:
    """bool[1, 1, 1, N + 1]: a mask in place of one of N x N, which attention outside `rows_apart` refuses.

    Without a mask, Transformers would make one.
    """
    return torch.ones(1, 1, 1, num_tokens + 1, dtype=torch.bool, device=device)


class _RowByRow(TorchFunctionMode):
    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = list(lengths)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        total = sum(self.lengths)
        if len(args) != 3 or any(value.shape[0] != 1 or value.shape[2] != total for value in args):
            raise ShapeError(
                f"attention by row: queries, keys and values must be [1, heads, {total}, size] of one pack: got "
                f"{[tuple(value.shape) for value in args]}."
            )
        options = {name: value for name, value in kwargs.items() if name in ("dropout_p", "scale", "enable_gqa")}
        # Split, not sliced: the gradient of a slice is as large as the whole.
        rows = zip(*(value.split(self.lengths, dim=2) for value in args), strict=True)
        found = [function(*row, is_causal=True, **options).transpose(1, 2) for row in rows]
        return torch.cat(found, dim=1).transpose(1, 2)
