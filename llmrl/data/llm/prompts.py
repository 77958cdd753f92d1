"""Which rows of a batch belong to one prompt, for what collects rows until a prompt has enough of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tensordict import is_tensorclass
from torch import Tensor

from llmrl.errors import ShapeError

__all__ = ["row_values"]


def row_values(column: Any, rows: int, reader: str) -> list[Hashable]:
    """A column of text or numbers as one hashable value per row, whatever container a batch keeps it in.

    Raises  ShapeError, in the name of ``reader``, for another number of values than rows

    >>> import torch
    >>> row_values(torch.tensor([[7], [8]]), 2, "me"), row_values("2 + 2?", 2, "me")
    ([7, 8], ['2 + 2?', '2 + 2?'])
    """
    if isinstance(column, Tensor):
        flat = column.reshape(rows, -1)
        return flat[:, 0].tolist() if flat.shape[1] == 1 else [tuple(row) for row in flat.tolist()]
    if is_tensorclass(column):  # one value for all rows
        return [column.data] * rows
    values = column.tolist() if hasattr(column, "tolist") else column
    if isinstance(values, str | int):
        return [values] * rows
    if len(values) != rows:
        raise ShapeError(f"{reader}: there must be one prompt per row: got {len(values)} for {rows} rows.")
    return [getattr(value, "data", value) for value in values]
