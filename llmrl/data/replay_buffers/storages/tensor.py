"""Rows in preallocated contiguous tensors, one per entry: the storage for rows of one fixed shape."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.replay_buffers.layout import (
    Layout,
    TensorLeaf,
    difference,
    put_rows_together,
    put_together,
    take_apart,
    take_rows_apart,
)
from llmrl.data.replay_buffers.storages.base import Storage, row_limit
from llmrl.data.replay_buffers.storages.list_storage import leading_size
from llmrl.errors import CheckpointError, DataError


class TensorStorage(Storage):
    """Rows of one fixed shape in tensors allocated once: a tensor, tensordict, tensorclass, or dict/tuple of these.

    ``storage`` is the allocation, used in place; its rows count as written (``len`` is ``max_size`` from the start), as
    for a dataset. The schema is the keys, shapes and dtypes of the allocation: a write with an unknown or missing key,
    or another dtype or shape, raises ``DataError`` naming it, before anything is written.

    >>> storage = TensorStorage(torch.zeros(4, 2))
    >>> storage.set(slice(0, 2), torch.ones(2, 2))
    >>> storage.get(torch.tensor([1, 3])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, storage: Any, max_size: int | None = None, *, device: torch.device | str | None = None) -> None:
        size = leading_size(storage)
        if max_size is not None and max_size != size:
            raise ValueError(f"TensorStorage: max_size must be the leading size: got {max_size}, expected {size}.")
        self._prepare(row_limit("TensorStorage", size), device)
        if self.device is None:  # where the allocation is, so that batches that name no device fit it
            tensors = [column for column in take_apart(storage)[1] if isinstance(column, Tensor)]
            self.device = tensors[0].device if tensors else None
        layout, columns = self._take_apart(storage, single=False)
        self._layout = layout
        self._columns = [column if self.device is None else _move(column, self.device) for column in columns]
        self._len = size

    def _prepare(self, max_size: int, device: torch.device | str | None) -> None:
        self.max_size = max_size
        self._auto_device = device == "auto"
        self.device = None if device is None or self._auto_device else torch.device(device)
        self._layout: Layout | None = None
        self._columns: list[Any] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def empty(self) -> None:
        self._len = 0

    def count(self, data: Any) -> int:
        return leading_size(data)

    def part(self, data: Any, start: int, end: int) -> Any:
        if isinstance(data, dict | tuple):
            return pytree.tree_map(lambda leaf: leaf[start:end], data, is_leaf=is_tensor_collection)
        return data[start:end]

    def set(self, index: int | slice | Tensor, data: Any) -> None:
        single = isinstance(index, int)
        layout, leaves = self._take_apart(data, single)
        if layout != self._layout:
            self._adopt(layout, leaves)
        end = self._end_of(index)
        for column, leaf in zip(self._columns, leaves, strict=True):
            if type(column) is list:
                _assign(column, index, leaf)
                continue
            if leaf.requires_grad:
                leaf = leaf.detach()
            if single or type(index) is slice:
                column[index] = leaf
            else:
                column[index.to(column.device)] = leaf.to(column.device)
        if end > self._len:
            self._len = end

    def get(self, index: int | slice | Tensor) -> Any:
        if self._layout is None:
            raise IndexError(f"{type(self).__name__}: the index must name a row: got {index} of 0 rows.")
        if isinstance(index, int):
            index %= self._len
            return put_rows_together(self._layout, self._read(slice(index, index + 1)))[0]
        if isinstance(index, slice):
            index = slice(*index.indices(self._len))
            size = len(range(index.start, index.stop, index.step))
            return put_together(self._layout, self._read(index), size)
        return put_together(self._layout, self._read(index), index.numel())

    def state_dict(self) -> dict[str, Any]:
        columns = None if self._layout is None else self._read(slice(0, self._len))
        return {"layout": self._layout, "columns": columns, "len": self._len, "max_size": self.max_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["max_size"] != self.max_size:
            raise CheckpointError(
                f"{type(self).__name__}: the state must be of a storage of the same size: got max_size "
                f"{state['max_size']}, expected {self.max_size}."
            )
        layout, columns = state["layout"], state["columns"]
        self._len = 0
        if layout is None:
            return
        if layout != self._layout:
            self._adopt(layout, columns)
        for column, rows in zip(self._columns, columns, strict=True):
            column[: len(rows)] = rows
        self._len = state["len"]

    def _take_apart(self, data: Any, single: bool) -> tuple[Layout, list[Any]]:
        if self._auto_device and (isinstance(data, Tensor) or is_tensor_collection(data)):
            self.device = data.device
            self._auto_device = False
        if isinstance(data, list) and not single:
            data = _stack(data)
        layout, leaves = take_apart(data, stacked=not single, device=self.device)
        if layout != self._layout and not layout.dense:
            try:
                dense = data.contiguous()
            except RuntimeError as error:
                raise DataError(
                    f"{type(self).__name__}: rows must have one fixed shape: got a ragged batch ({error}); "
                    "LazyStackStorage keeps ragged rows."
                ) from error
            layout, leaves = take_apart(dense, stacked=not single, device=self.device)
            if not layout.dense:
                raise DataError(
                    f"{type(self).__name__}: rows must have one fixed shape: got entries of kind "
                    f"{sorted({kind.value for kind in layout.kinds if type(kind) is not TensorLeaf})}; "
                    "LazyStackStorage keeps ragged rows."
                )
        return layout, leaves

    def _adopt(self, layout: Layout, leaves: list[Any]) -> None:
        """Allocates for the first rows; raises if later ones do not have their schema."""
        if self._layout is not None:
            raise DataError(
                f"{type(self).__name__}: rows must have the schema of the first write: "
                f"{difference(self._layout.root, layout.root)}."
            )
        columns: list[Any] = []
        for kind, leaf in zip(layout.kinds, leaves, strict=True):
            if type(kind) is TensorLeaf:
                device = leaf.device if self.device is None else self.device
                columns.append(torch.zeros((self.max_size, *kind.shape), dtype=kind.dtype, device=device))
            else:
                columns.append([None] * self.max_size)
        self._layout, self._columns = layout, columns

    def _end_of(self, index: int | slice | Tensor) -> int:
        if type(index) is slice:
            first, end = index.start, index.stop
        elif isinstance(index, int):
            first, end = index, index + 1
        else:
            if not index.numel():
                return self._len
            first, end = self._len, int(index.max()) + 1
        if end > self.max_size:
            self._check_fits(end - 1)
        if first > self._len:
            raise RuntimeError(
                f"{type(self).__name__}: rows are written without gaps: got position {first}, expected at most "
                f"{self._len}."
            )
        return end

    def _read(self, index: slice | Tensor) -> list[Any]:
        if type(index) is slice:
            return [column[index] if type(column) is list else column[index].clone() for column in self._columns]
        out = []
        for column in self._columns:
            if type(column) is list:
                out.append([column[position] for position in index.tolist()])
            else:
                out.append(column.index_select(0, index if column.device == index.device else index.to(column.device)))
        return out


class LazyTensorStorage(TensorStorage):
    """The same, allocated at the first write from the shapes and dtypes of its rows, for ``max_size`` rows.

    ``device="auto"`` is the device of the first data.

    >>> from tensordict import TensorDict
    >>> storage = LazyTensorStorage(100)
    >>> storage.set(slice(0, 3), TensorDict(obs=torch.zeros(3, 4), batch_size=[3]))
    >>> len(storage), storage.get(slice(0, 2))["obs"].shape
    (3, torch.Size([2, 4]))
    >>> storage.set(3, TensorDict(observation=torch.zeros(4)))
    Traceback (most recent call last):
    llmrl.errors.DataError: LazyTensorStorage: rows must have the schema of the first write: unknown key 'observation'.
    """

    def __init__(self, max_size: int, *, device: torch.device | str = "cpu") -> None:
        self._prepare(row_limit("LazyTensorStorage", max_size), device)


def _stack(rows: list[Any]) -> Any:
    """A list of single rows as one batch."""
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    parts = take_rows_apart(rows) if is_tensor_collection(rows[0]) else None
    if parts is None:
        raise DataError(f"TensorStorage: a list must hold tensors, or tensordicts with equal keys: got {rows[:2]}...")
    return put_together(*parts, len(rows))


def _assign(column: list[Any], index: int | slice | Tensor, values: Any) -> None:
    if isinstance(index, int):
        column[index] = values
    elif isinstance(index, slice):
        column[index] = list(values)
    else:
        for position, value in zip(index.tolist(), values, strict=True):
            column[position] = value


def _move(column: Any, device: torch.device) -> Any:
    return column if isinstance(column, list) else column.to(device)
