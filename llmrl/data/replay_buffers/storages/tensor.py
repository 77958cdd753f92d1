"""Rows in preallocated contiguous tensors, one per entry: the storage for rows of one fixed shape."""

from __future__ import annotations

import json
import weakref
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.ragged.layout import (
    NUMBERS,
    Layout,
    TensorLeaf,
    is_leaf,
    is_tree,
    put_rows_together,
    put_together,
    take_apart,
    take_rows_apart,
    tree_map,
)
from llmrl.data.replay_buffers.grid_index import shape_cells, time_first
from llmrl.data.replay_buffers.process_lock import ProcessLock
from llmrl.data.replay_buffers.serialization import decode, encode
from llmrl.data.replay_buffers.storages.base import Index, Key, Storage, row_limit
from llmrl.data.replay_buffers.storages.schema import Schema, difference
from llmrl.data.replay_buffers.storages.shared_folder import SharedFolder
from llmrl.data.replay_buffers.storages.undo import UndoLog
from llmrl.errors import CheckpointError, DataError, UnsupportedError

_SCHEMA_FILE = "schema.json"
_FEW_BYTES = 1 << 20


class TensorStorage(Storage):
    """Rows of one fixed shape in tensors allocated once: a tensor, tensordict, tensorclass, or dict/tuple of these.

    ``storage`` is the allocation, used in place, with ``ndim`` leading dimensions that count rows. By default its rows
    count as written (``len`` is ``max_size``), as for a dataset; ``filled=False`` treats it as empty memory. The schema
    is the keys, shapes and dtypes of the allocation: a write with an unknown or missing key, or another dtype or shape,
    raises a ``DataError`` that names it, before anything is written.

    >>> storage = TensorStorage(torch.zeros(4, 2))
    >>> storage.set(slice(0, 2), torch.ones(2, 2))
    >>> storage.get(torch.tensor([1, 3])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        ndim: int = 1,
        filled: bool = True,
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise ValueError("TensorStorage: storage must be the allocation: got None; LazyTensorStorage allocates.")
        rows, trailing = time_first(storage, 0, ndim)
        size = self.count(rows)
        if max_size is not None and max_size != size:
            raise ValueError(f"TensorStorage: max_size must be the leading size: got {max_size}, expected {size}.")
        self._begin(size, device, ndim)
        self._trailing = trailing
        if self.device is None:  # the allocation's device, so that batches without a declared device match the schema
            tensors = [column for column in take_apart(rows)[1] if isinstance(column, Tensor)]
            self.device = tensors[0].device if tensors else None
        layout, columns = self._take_apart(rows, single=False)
        if self.device is not None:
            columns = [column if isinstance(column, list) else column.to(self.device) for column in columns]
        self._hold(layout, columns)
        self.counters.length = size if filled else 0

    def _begin(self, max_size: int, device: torch.device | str | None, ndim: int) -> None:
        super().__init__()
        who = type(self).__name__
        if ndim < 1:
            raise ValueError(f"{who}: ndim counts the dimensions that hold rows and must be at least 1: got {ndim}.")
        self._max_size = self._asked_size = row_limit(who, max_size)
        self._trailing: tuple[int, ...] = ()
        self.ndim = ndim
        self._auto_device = device == "auto"
        self.device = None if device is None or self._auto_device else torch.device(device)
        self._schema: Schema | None = None
        self._columns: list[Any] = []
        self._arrays: list[Any] = []
        self._plain = False  # True if all columns are CPU tensors
        self._folder: SharedFolder | None = None
        self._undo: UndoLog | None = None  # once a row of shared memory is replaced
        self._cleanup = True

    # --- rows ---

    def set(self, index: Index, data: Any, *, set_cursor: bool = True) -> None:
        counters = self.counters
        counters.check_writable(type(self).__name__)
        length = counters.length
        if type(index) is not int or index < 0:
            index = self._places_at(index)
        if type(index) is slice:
            count, first, end = index.stop - index.start, index.start, index.stop
        elif isinstance(index, int):
            count, first, end = None, index, index + 1
        else:
            count, end = index.numel(), int(index.max()) + 1 if index.numel() else 0
            new = index[index >= length].unique() if end > length else index[:0]
            first = end - len(new)  # the first new position if the new positions are contiguous
        leaves = self._leaves(data, count)
        self._check_place(first, end, length)
        if self._folder is not None and (first < length or isinstance(index, Tensor)):
            if self._undo is None:
                self._undo = UndoLog(self._folder, self._columns)
            counters.replaced = self._undo.remember(index, length)
        try:
            self._write(index, leaves, count)
        except BaseException:
            self._repair()
            raise
        counters.replaced = 0
        if end > length:  # after the rows: a process that sees the new length must find the rows
            counters.length = end
        counters.changed()

    def _write(self, index: Index, leaves: list[Any], count: int | None) -> None:
        columns = self._columns if count is not None and count > self._few else self._arrays
        # numpy would treat a one-element tensor as a number.
        where = index.numpy(force=True) if isinstance(index, Tensor) else index
        for column, leaf in zip(columns, leaves, strict=True):
            if type(column) is list:
                _assign(column, index, leaf)
            elif type(column) is np.ndarray:
                column[where] = leaf.numpy(force=True)
            elif count is None or type(index) is slice:
                column[index] = leaf.detach()
            else:
                column[index.to(column.device)] = leaf.detach().to(column.device)

    def _repair(self) -> None:
        """Undoes a write that did not end: its process was killed, or it raised an error."""
        if self.counters.replaced:
            self._known_schema()
            UndoLog(self._folder, self._columns).put_back(self.counters.replaced)
            self.counters.replaced = 0
            self.counters.changed()

    def get(self, index: Index) -> Any:
        return self.batch(self._rows_at(index))

    def batch(self, index: int | slice | Tensor) -> Any:
        schema = self._known_schema()
        if schema is None:
            raise IndexError(
                f"{type(self).__name__}: the index must name a row: got {index} of 0 rows; the first write says what "
                "rows look like."
            )
        if isinstance(index, Tensor):
            return put_together(schema.layout, self._read(index), index.numel())
        if isinstance(index, int):
            return put_rows_together(schema.layout, self._read(slice(index, index + 1)), 1)[0]
        return put_together(schema.layout, self._read(index), index.stop - index.start)

    def entry(self, key: Key, index: Tensor) -> Any:
        schema = self._known_schema()
        if schema is None:
            return super().entry(key, index)
        column = self._columns[schema.column(type(self).__name__, key)]
        return _select(column, index)

    def may_have(self, name: str) -> bool:
        schema = self._known_schema()
        return schema is None or name in schema.names

    # --- the grid ---

    @property
    def max_size(self) -> int:
        if self._schema is None:
            self._known_schema()
        return self._max_size

    @property
    def trailing(self) -> tuple[int, ...]:
        if self._schema is None:
            self._known_schema()
        return self._trailing

    def prepare(self, trailing: tuple[int, ...]) -> None:
        if trailing == self.trailing:
            return
        if self._known_schema() is not None:
            raise DataError(
                f"{type(self).__name__}: every batch must have as many parallel streams as the first: got "
                f"{list(trailing)}, expected {list(self.trailing)}."
            )
        self._trailing = trailing
        streams = prod(trailing)
        self._max_size = -(-self._asked_size // streams) * streams

    # --- several processes ---

    @property
    def folder(self) -> Path | None:
        """The folder of the shared files; None if the storage is not shared."""
        return None if self._folder is None else self._folder.path

    def share(self) -> None:
        """Moves the rows to shared memory; any process may make the first write afterwards.

        Raises: UnsupportedError for rows on another device than the CPU, or with Python values.
        """
        if not self.shared:
            self._share(SharedFolder(type(self).__name__, in_memory=True, cleanup=self._cleanup))

    def _share(self, folder: SharedFolder) -> None:
        if self.device is not None and self.device.type != "cpu":
            raise UnsupportedError(
                f"{type(self).__name__}: only CPU memory can be shared between processes: got a storage on "
                f"{self.device}; keep it in one process, or allocate it on the CPU."
            )
        self._folder = folder
        try:
            if self._schema is not None:
                columns = self._allocate(self._schema.layout)
                for new, old in zip(columns, self._columns, strict=True):
                    new.copy_(old)
                self._hold(self._schema.layout, columns)
        except BaseException:
            self._folder = None
            raise
        self.counters.share(folder.file("counters.int64"))
        self.counters.allocated = self._schema is not None
        self.lock = ProcessLock(folder.file("lock"))
        self.lock.on_enter = weakref.WeakMethod(self._repair)

    def _known_schema(self) -> Schema | None:
        """The schema, loaded from the folder if another process has fixed it."""
        # ``allocated`` is in shared memory: if another process wrote first, its schema is in the folder.
        if self._schema is None and self.counters.allocated:
            file = self._folder.find(_SCHEMA_FILE)
            try:
                state = json.loads(file.read_bytes())
            except ValueError as error:
                raise CheckpointError(f"{type(self).__name__}: {file} must be its schema: got {error}.") from error
            self._trailing, self._max_size = tuple(state["trailing"]), state["max_size"]
            layout = decode(state["layout"], _no_tensors)
            columns = [
                self._folder.map(f"column_{number}.bin", (self._max_size, *kind.shape), kind.dtype)
                for number, kind in enumerate(layout.kinds)
            ]
            self._hold(layout, columns)
        return self._schema

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_arrays": [], "_undo": None}
        if self.shared:
            state |= {"_columns": [], "_schema": None, "_auto_device": False, "device": torch.device("cpu")}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.shared:
            self.lock.on_enter = weakref.WeakMethod(self._repair)
        if self._schema is not None:
            self._hold(self._schema.layout, self._columns)

    # --- how ---

    def _all_rows(self, copy: bool) -> Any:
        if copy:
            return self[:]
        rows = [column[: len(self)] for column in self._columns]
        return shape_cells(put_together(self._known_schema().layout, rows, len(self)), self.shape)

    def _leaves(self, data: Any, count: int | None) -> list[Any]:
        """The columns of the data to write, checked against the schema; the first write sets the schema."""
        schema = self._known_schema()
        if schema is not None:
            leaves = schema.match(data, count)
            if leaves is not None:
                return leaves
        if count is not None and self.count(data) != count:
            raise DataError(
                f"{type(self).__name__}: one row per position is needed: got {self.count(data)} rows for {count} "
                "positions."
            )
        layout, leaves = self._take_apart(data, single=count is None)
        self._fix_schema(layout, leaves)
        return leaves

    def _take_apart(self, data: Any, single: bool) -> tuple[Layout, list[Any]]:
        if self._auto_device and (isinstance(data, Tensor) or is_tensor_collection(data)):
            self.device = data.device
            self._auto_device = False
        if isinstance(data, list) and not single:
            data = _stack(data)
        layout, leaves = take_apart(data, stacked=not single, device=self.device, keep_names=False)
        if not layout.dense:  # a lazy stack or list, whose rows may nevertheless have equal shapes
            try:
                dense = tree_map(lambda leaf: leaf.contiguous() if hasattr(leaf, "contiguous") else leaf, data)
            except RuntimeError as error:
                raise DataError(
                    f"{type(self).__name__}: rows must have one fixed shape: got a ragged batch ({error}); "
                    "LazyStackStorage keeps ragged rows."
                ) from error
            layout, leaves = take_apart(dense, stacked=not single, device=self.device, keep_names=False)
            if not layout.dense:
                raise DataError(
                    f"{type(self).__name__}: rows must have one fixed shape: got entries of kind "
                    f"{sorted({kind.value for kind in layout.kinds if type(kind) is not TensorLeaf})}; "
                    "LazyStackStorage keeps ragged rows."
                )
        return layout, leaves

    def _fix_schema(self, layout: Layout, leaves: list[Any]) -> None:
        """Allocates memory for the schema of the first write; raises if a later write has another schema."""
        schema = self._known_schema()
        if schema is None:
            devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
            with self.lock:
                self._hold(layout, self._allocate(layout, devices))
                self.counters.allocated = self.shared
        elif layout != schema.layout:
            raise DataError(
                f"{type(self).__name__}: rows must have the schema of the first write: "
                f"{difference(schema.layout.root, layout.root)}."
            )

    def _hold(self, layout: Layout, columns: list[Any]) -> None:
        self._schema, self._columns = Schema(layout), columns
        # numpy views of the same memory: numpy writes few rows in two thirds of torch's time, but uses only one thread.
        self._arrays = [_array(column) for column in columns]
        self._few = _FEW_BYTES // max(sum(map(_row_bytes, layout.kinds)), 1)
        self._plain = all(isinstance(column, Tensor) and column.is_cpu for column in columns)

    def _allocate(self, layout: Layout, devices: list[torch.device | None] | None = None) -> list[Any]:
        if self._folder is None:
            return [
                torch.zeros((self.max_size, *kind.shape), dtype=kind.dtype, device=self.device or device)
                if type(kind) is TensorLeaf
                else [None] * self.max_size
                for kind, device in zip(layout.kinds, devices, strict=True)
            ]
        if not all(type(kind) is TensorLeaf for kind in layout.kinds):
            raise UnsupportedError(
                f"{type(self).__name__}: only tensors can be shared between processes or memory-mapped: got text or "
                "another Python value; keep it in a LazyTensorStorage or LazyStackStorage of one process."
            )
        self._folder.check_space(self.max_size * sum(map(_row_bytes, layout.kinds)))
        columns = [
            self._folder.allocate(f"column_{number}.bin", (self.max_size, *kind.shape), kind.dtype)
            for number, kind in enumerate(layout.kinds)
        ]
        state = {"layout": encode(layout, _no_tensors), "max_size": self.max_size, "trailing": self.trailing}
        self._folder.file(_SCHEMA_FILE).write_text(json.dumps(state))  # others read it once ``allocated`` is set
        return columns

    def _read(self, index: slice | Tensor) -> list[Any]:
        if type(index) is slice:
            return [column[index] if type(column) is list else column[index].clone() for column in self._columns]
        if self._plain and index.is_cpu:
            return [column.index_select(0, index) for column in self._columns]
        return [_select(column, index) for column in self._columns]


class LazyTensorStorage(TensorStorage):
    """A `TensorStorage` for ``max_size`` rows, allocated from the shapes and dtypes of the first write.

    ``device="auto"`` is the device of the first data. With ``ndim`` larger than 1, ``max_size`` counts cells and is
    rounded up to whole time steps. ``shared_init`` shares the storage from the start: the process that writes first
    allocates for all. Shared memory is freed when this storage is garbage-collected; with ``cleanup_memmap=False`` it
    stays available to other processes until the files in ``storage.folder`` are removed.

    >>> from tensordict import TensorDict
    >>> storage = LazyTensorStorage(100)
    >>> storage.set(slice(0, 3), TensorDict(obs=torch.zeros(3, 4), batch_size=[3]))
    >>> len(storage), storage.get(slice(0, 2))["obs"].shape
    (3, torch.Size([2, 4]))
    >>> storage.set(3, TensorDict(observation=torch.zeros(4)))
    Traceback (most recent call last):
    llmrl.errors.DataError: LazyTensorStorage: rows must have the schema of the first write: unknown key 'observation'.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        if consolidated:
            raise UnsupportedError(
                "LazyTensorStorage: every entry has its own block of memory, which makes reads fast: got "
                "consolidated=True; leave it out, and call consolidate() on a batch that is to be sent somewhere."
            )
        self._begin(max_size, device, ndim)
        self._cleanup = cleanup_memmap
        if shared_init:
            self.share()


class LazyMemmapStorage(TensorStorage):
    """A `TensorStorage` in memory-mapped files: rows may exceed memory, and several processes share them.

    The files are in ``scratch_dir``, which must be new or empty unless ``existsok`` allows replacing its files, or in a
    temporary folder. Their full size is reserved on disk at the first write, so that a full disk raises there.
    ``auto_cleanup`` removes them when this storage is garbage-collected; by default only in a temporary folder.

    Every process that receives the storage, by fork, spawn or forkserver, reads and writes the same rows, even if it is
    the first to write; ``shared_init`` has no effect.

    >>> storage = LazyMemmapStorage(100)
    >>> storage.set(slice(0, 3), {"obs": torch.zeros(3, 4)})
    >>> storage.shared, storage.get(2)["obs"].tolist()
    (True, [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | Path | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = True,
        auto_cleanup: bool | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"LazyMemmapStorage: files can only be mapped to CPU memory: got device={str(device)!r}; move the "
                "samples, for instance with a transform."
            )
        self._begin(max_size, device, ndim)
        self._share(SharedFolder("LazyMemmapStorage", scratch_dir, existsok=existsok, cleanup=auto_cleanup))


def _no_tensors(*reference: Any) -> Any:
    raise CheckpointError("the layout of shared rows must hold no tensors: got one in a field of a tensorclass.")


def _stack(rows: list[Any]) -> Any:
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    if is_tree(rows[0]):
        leaves, specs = zip(*[pytree.tree_flatten(row, is_leaf=is_leaf) for row in rows], strict=True)
        if all(spec == specs[0] for spec in specs):
            return pytree.tree_unflatten([_stack(list(column)) for column in zip(*leaves, strict=True)], specs[0])
    parts = take_rows_apart(rows) if is_tensor_collection(rows[0]) else None
    if parts is None:
        raise DataError(
            f"TensorStorage: a list must hold rows: tensors, tensordicts with equal keys, or trees of these: got "
            f"{rows[:2]}..."
        )
    return put_together(*parts, len(rows))


def _assign(column: list[Any], index: int | slice | Tensor, values: Any) -> None:
    if isinstance(index, int):
        column[index] = values
    elif isinstance(index, slice):
        column[index] = list(values)
    else:
        for position, value in zip(index.tolist(), values, strict=True):
            column[position] = value


def _select(column: Any, index: Tensor) -> Any:
    if type(column) is list:
        return [column[position] for position in index.tolist()]
    return column.index_select(0, index if column.device == index.device else index.to(column.device))


def _array(column: Any) -> Any:
    """The column as a numpy array of the same memory, or unchanged if numpy cannot write to it as torch does."""
    plain = isinstance(column, Tensor) and column.is_cpu and column.dtype in NUMBERS and column.is_contiguous()
    return column.detach().numpy() if plain else column


def _row_bytes(kind: Any) -> int:
    return prod(kind.shape) * kind.dtype.itemsize if type(kind) is TensorLeaf else 0
