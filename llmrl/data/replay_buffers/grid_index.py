"""Conversions between grid indices and flat cell positions of a storage with several dimensions.

Legend: T time, E parallel streams (the product of the grid's other sizes). A storage keeps cell ``(t, e)`` at position
``t * E + e``. Batches are written and read with the time dimension at the buffer's ``dim_extend``. The cells may hold
any data. With one dimension all of this reduces to plain indexing of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.ragged.layout import is_leaf, tree_leaves, tree_map
from llmrl.errors import ShapeError

Where = int | slice | Tensor


def select_cells(index: Any, shape: Sequence[int], who: str, time_dim: int = 0) -> Where:
    """The positions int64[...] that ``index`` selects on the grid, as it would on a tensor of that shape.

    ``shape`` is the grid with time first; ``time_dim`` is the caller's time dimension. An int64[N, ndim] tensor is a
    list of coordinates (time first), as returned by ``extend`` and ``sample``. Returns an int for a single row, and a
    slice for contiguous rows of a one-dimensional grid. Raises: IndexError outside the grid.
    """
    length = prod(shape)
    if isinstance(index, range | list):
        index = torch.tensor(index, dtype=None if len(index) else torch.int64)
    if len(shape) == 1:
        if isinstance(index, slice):
            start, end, step = index.indices(length)
            return slice(start, max(start, end)) if step == 1 else torch.tensor(range(length)[index], dtype=torch.int64)
        if isinstance(index, int):
            if not -length <= index < length:
                raise IndexError(f"{who}: positions must lie in the {length} rows: got {index}.")
            return index % length
        if isinstance(index, Tensor) and index.dtype is torch.int64 and index.ndim == 1:
            if index.numel() and not -length <= int(index.min()) <= int(index.max()) < length:
                raise IndexError(f"{who}: positions must lie in the {length} rows: got {index}.")
            return index % length if index.numel() else index
    if isinstance(index, Tensor) and index.dtype is torch.bool and len(shape) == 1 and index.shape != (length,):
        raise IndexError(f"{who}: a mask must have one entry per row: got {list(index.shape)}, {length} rows.")
    is_integers = isinstance(index, Tensor) and index.dtype is torch.int64
    if len(shape) > 1 and is_integers and index.ndim == 2 and index.shape[1] == len(shape):  # coordinates
        if not bool(((index >= 0) & (index < torch.tensor(shape))).all()):
            raise IndexError(f"{who}: coordinates must lie on the grid {list(shape)}: got {index}.")
        return flat_cells(index, shape[1:])
    # Any other index is applied to a tensor of that shape that contains the positions.
    grid = torch.arange(length).view(*shape).movedim(0, time_dim)
    try:
        where = grid[index]
    except IndexError as error:
        raise IndexError(f"{who}: positions must lie in the {length} rows: got {index} ({error}).") from error
    return where if where.ndim else int(where)


def coordinates(cells: Tensor, trailing: Sequence[int]) -> Tensor:
    """Positions int64[N] of a grid of several dimensions as coordinates int64[N, ndim], time first."""
    parts = []
    for size in reversed(trailing):
        parts.append(cells % size)
        cells = cells // size
    return torch.stack([cells, *reversed(parts)], -1)


def flat_cells(index: Tensor, trailing: Sequence[int]) -> Tensor:
    """The inverse of ``coordinates``."""
    cells, *parts = index.unbind(-1)
    for part, size in zip(parts, trailing, strict=True):
        cells = cells * size + part
    return cells


def time_first(data: Any, time_dim: int, ndim: int) -> tuple[Any, tuple[int, ...]]:
    """Flattens a batch with time at ``time_dim`` to rows in cell order; also returns the grid's sizes after time.

    Raises: ShapeError if it has fewer than ``ndim`` dimensions.
    """
    if ndim == 1 and time_dim == 0:
        return data, ()
    first = data if is_leaf(data) else tree_leaves(data)[0]
    if not isinstance(first, Tensor) and not is_tensor_collection(first):
        raise ShapeError(f"extend: a batch on a grid consists of tensors or tensordicts: got {type(first).__name__}.")
    shape = first.shape
    if len(shape) < max(ndim, time_dim + 1):
        raise ShapeError(
            f"extend: a batch for a storage of {ndim} dimensions has time in dimension {time_dim}: got the shape "
            f"{list(shape)}."
        )
    rest = [dim for dim in range(max(ndim, time_dim + 1)) if dim != time_dim]
    order = [time_dim, *rest]

    def cells(leaf: Any) -> Any:
        leaf = leaf if time_dim == 0 else leaf.permute(*order, *range(len(order), leaf.ndim))
        return leaf.reshape(-1, *leaf.shape[ndim:]) if ndim > 1 else leaf

    return _map(cells, data), tuple(shape[dim] for dim in rest[: ndim - 1])


def shape_cells(batch: Any, shape: Sequence[int]) -> Any:
    """Rows [N] reshaped to a grid of ``shape``; unchanged (also lists of rows) if it has one dimension."""
    return batch if len(shape) == 1 else _map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), batch)


def cells_in_row(where: Where, data: Any) -> tuple[Where, Any]:
    """Flattens positions of several dimensions, and the rows for them, to one dimension.

    A tensordict is broadcast over the positions. Raises: ShapeError if the shapes do not fit.
    """
    if not isinstance(where, Tensor) or where.ndim < 2:
        return where, data
    shapes = [data.batch_size] if is_tensor_collection(data) else [leaf.shape for leaf in tree_leaves(data)]
    if is_tensor_collection(data) and data.batch_dims <= where.ndim and data.batch_size != where.shape:
        with contextlib.suppress(RuntimeError):  # raised below, with both shapes
            data = data.expand(where.shape)
            shapes = [where.shape]
    for shape in shapes:
        if shape[: where.ndim] != where.shape:
            raise ShapeError(
                f"ReplayBuffer: one row per position is needed: got rows of shape {list(shape)} for positions of shape "
                f"{list(where.shape)}."
            )
    return where.reshape(-1), tree_map(lambda leaf: leaf.flatten(0, where.ndim - 1), data)


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    return function(data) if is_leaf(data) else tree_map(function, data)
