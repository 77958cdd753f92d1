"""Columns of plain Python objects (strings, message lists) in a batch, built and read in microseconds.

TensorDict stores them as a ``NonTensorStack`` of one ``NonTensorData`` per row. Its public constructor and ``tolist``
cost 3 to 7 us per row; the two functions below cost under one. Everything else about the stack is TensorDict's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["column", "column_values"]

_SCALAR = torch.Size([])


def column(values: Iterable[Any]) -> NonTensorStack:
    """A column of one Python object per row.

    Returns  NonTensorStack [B]; ``td[i]``, slices, masks and ``torch.stack`` work on it as on any other column

    >>> column(["a", "b", "c"])[1:].tolist()
    ['b', 'c']
    """
    rows = [_cell(value) for value in values]
    if not rows:
        return NonTensorStack(stack_dim=0)
    stack = NonTensorStack.__new__(NonTensorStack)
    LazyStackedTensorDict.__init__(stack, *rows)
    return stack


def column_values(td: TensorDictBase, key: str) -> list[Any] | None:
    """The Python objects of a column, one per row; None where the batch has no such column.

    Reads  NonTensorStack [B], NonTensorData [B] (the same object for every row) or Tensor [B, ...] (as Python numbers)

    >>> td = TensorDict({"query": column(["a", "b"])}, batch_size=[2])
    >>> column_values(td, "query"), column_values(td, "answer")
    (['a', 'b'], None)
    """
    value = td.get(key, None)
    if value is None:
        return None
    if isinstance(value, LazyStackedTensorDict):
        return [_value(cell) for cell in value.tensordicts]
    if isinstance(value, NonTensorData):
        return [value.data] * (td.batch_size[0] if td.batch_size else 1)
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value)


def _cell(value: Any) -> NonTensorData:
    # What ``NonTensorData(value)`` builds, without its argument handling.
    cell = object.__new__(NonTensorData)
    cell.__dict__["_tensordict"] = TensorDict._new_unsafe({}, batch_size=_SCALAR)
    cell.__dict__["_non_tensordict"] = {"data": value, "_is_non_tensor": True, "_metadata": None}
    cell.__dict__["_is_initialized"] = True
    return cell


def _value(cell: Any) -> Any:
    if isinstance(cell, NonTensorData):
        return cell._non_tensordict["data"]
    return cell.tolist() if isinstance(cell, NonTensorStack) else cell
