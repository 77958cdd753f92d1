"""Which rows of a batch belong to one prompt, for what collects rows until a prompt has enough of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from tensordict import is_tensorclass
from torch import Tensor

from llmrl.errors import ShapeError

__all__ = ["row_values"]


def row_values(column: Any, rows: int, reader: str) -> list[Hashable]:
    """A column of text or numbers as one hashable value per row, whatever container a batch keeps it in.

    Raises  ShapeError, in the name of ``reader``, for another number of values than rows

    >>> import torch
    >>> row_values(np.array(["2 + 2?", "1 + 1?"]), 2, "me")
    ['2 + 2?', '1 + 1?']
    >>> row_values(torch.tensor([[7], [8]]), 2, "me"), row_values("2 + 2?", 2, "me")
    ([7, 8], ['2 + 2?', '2 + 2?'])
    """
    if isinstance(column, Tensor):
        flat = column.reshape(rows, -1)
        return flat[:, 0].tolist() if flat.shape[1] == 1 else [tuple(row) for row in flat.tolist()]
    values = column.data if is_tensorclass(column) else column
    if not isinstance(values, np.ndarray) and (is_tensorclass(column) or isinstance(values, str | int)):
        return [_hashable(values)] * rows  # one value for all rows
    values = values.tolist() if hasattr(values, "tolist") else values
    if len(values) != rows:
        raise ShapeError(f"{reader}: there must be one prompt per row: got {len(values)} for {rows} rows.")
    return [_hashable(value) for value in values]


def _hashable(value: Any) -> Hashable:
    """A cell as text or a number, also where it is wrapped or comes from numpy; several numbers as a tuple."""
    value = value.data if is_tensorclass(value) else value
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
