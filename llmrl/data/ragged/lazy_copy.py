"""Ragged rows that stay in the memory of their owner, a replay buffer, until they are read.

Most of a sample is read once, and padded: a copy that is only copied again would be half of the work. The holder of
``BorrowedRows`` (`RaggedStack`) never hands out the tensors: it asks for ``copies``, or for the padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.ragged.padding import pad_rows

__all__ = ["BorrowedRows", "copy_rows", "rows_form"]

# numpy copies these row by row in two thirds of the time that torch takes, because its views are cheaper.
_ARRAYS = {torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

Form = tuple[torch.dtype, torch.device, torch.Size | None]


class BorrowedRows:
    """Tensors without gradient that their owner replaces but never changes. Only copies of them come out.

    >>> owned = [torch.arange(2), torch.arange(3)]
    >>> rows = BorrowedRows(owned, rows_form(owned))
    >>> rows.padded(value=-1, side="left").tolist()
    [[-1, 0, 1], [0, 1, 2]]
    >>> rows.copies()[0].zero_().tolist(), owned[0].tolist()
    ([0, 0], [0, 1])
    """

    __slots__ = ("_form", "_rows")

    def __init__(self, rows: Sequence[Tensor], form: Form | None) -> None:
        self._rows = rows
        self._form = form

    def __len__(self) -> int:
        return len(self._rows)

    def copies(self) -> list[Tensor]:
        return copy_rows(self._rows, self._form)

    def padded(self, value: float, side: str) -> Tensor:
        """Tensor[B, T, ...] as of ``pad_rows``, with a single copy."""
        rows, form = self._rows, self._form
        if form is None or form[2] is None or form[0] not in _ARRAYS or form[1].type != "cpu":
            return pad_rows(rows, value=value, side=side)
        arrays = [row.numpy() for row in rows]
        sizes = [len(array) for array in arrays]
        longest = max(sizes)
        make = partial(np.full, fill_value=value) if value else np.zeros
        out = make((len(rows), longest, *form[2]), dtype=arrays[0].dtype)
        for place, array, size in zip(out, arrays, sizes, strict=True):
            place[slice(size) if side == "right" else slice(longest - size, longest)] = array
        return torch.from_numpy(out)

    def __reduce__(self) -> Any:
        return BorrowedRows, (self.copies(), self._form)  # also a copy.copy has its own memory


def rows_form(rows: Sequence[Tensor]) -> Form | None:
    """The common dtype, device and shape after the first dimension of rows that one kernel can copy.

    The shape is None for rows without dimensions. None for rows that differ.
    """
    kinds = {(type(row), row.dtype, row.device, row.layout, row.ndim) for row in rows}
    if len(kinds) != 1:
        return None
    kind, dtype, device, layout, dims = kinds.pop()
    if kind is not Tensor or layout is not torch.strided:
        return None
    if dims < 2:
        return dtype, device, None if not dims else rows[0].shape[1:]
    inner = {row.shape[1:] for row in rows}
    return (dtype, device, inner.pop()) if len(inner) == 1 else None


def copy_rows(rows: Sequence[Tensor], form: Form | None, device: torch.device | None = None) -> list[Tensor]:
    """Copies: views of one fresh block of memory if the rows have a common ``form``."""
    if form is None:
        return [row.clone() if device is None else row.clone().to(device) for row in rows]
    if len(rows) == 1:
        return [rows[0].clone() if device is None else rows[0].clone().to(device)]
    flat = form[2] is None
    block = torch.stack(rows) if flat else torch.cat(rows)
    block = block if device is None else block.to(device)
    return list(block.unbind(0) if flat else block.split_with_sizes([row.shape[0] for row in rows]))
