"""The storage: rows at integer positions, and their counters."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from math import prod
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.ragged.layout import is_leaf, is_tree, tree_leaves, tree_map
from llmrl.data.replay_buffers.grid_index import cells_in_row, select_cells, shape_cells, time_first
from llmrl.errors import CheckpointError, MissingKeyError, UnsupportedError, did_you_mean

Key = str | tuple[str, ...]
Index = int | slice | range | Sequence[int] | Tensor  # a tensor of positions, or a mask


_WORDS = 6


def _word(place: int, doc: str) -> property:
    def get(counters: Counters) -> int:
        return counters._view[place]

    def put(counters: Counters, value: int) -> None:
        counters._view[place] = value

    return property(get, put, doc=doc)


class Counters:
    """A storage's counters in one int64 tensor, which can be shared memory; guarded by the storage's lock.

    ``mutations`` never decreases: a reader can compare it with an earlier value to detect that rows have changed, even
    by another process.

    >>> counters = Counters()
    >>> counters.length, counters.cursor = 3, 3
    >>> counters
    Counters(length=3, cursor=3, write_count=0)
    """

    length = _word(0, "Number of rows (cells, if the storage has several dimensions).")
    cursor = _word(1, "Position of the next row.")
    write_count = _word(2, "Number of rows ever written by a writer.")
    mutations = _word(3, "Number of changes of the content: writes, replacements, loads, empty.")
    allocated = _word(4, "Not 0 once some process has allocated the columns of a shared storage.")
    replaced = _word(5, "Rows that a write into a shared storage is replacing; 0 outside of a write.")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._path: Path | None = None
        self._map(torch.zeros(_WORDS, dtype=torch.int64))

    def _map(self, words: Tensor) -> None:
        self.words = words
        self._view = memoryview(words.numpy())  # ten times faster to access than the tensor

    def changed(self) -> None:
        self._view[3] += 1

    # --- several processes ---

    @property
    def shared(self) -> bool:
        return self._path is not None

    def share(self, path: Path) -> None:
        """Moves the counters into the file ``path``; pickled copies made afterwards map the same file."""
        path.write_bytes(bytes(self.words.numpy()))
        self._path = path
        self._map(_map_file(path))

    def check_writable(self, who: str) -> None:
        """Raises in a forked process, whose writes would stay in its private copy of the memory."""
        if self._path is None and os.getpid() != self._pid:
            raise RuntimeError(
                f"{who}: rows written by a forked process stay in its private copy of the memory: got a write in "
                f"process {os.getpid()} into a storage of process {self._pid}; call share() before the fork, or use "
                "LazyMemmapStorage."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "words": self.words.clone() if self._path is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pid = os.getpid()
        self._path = state["path"]
        self._map(state["words"] if self._path is None else _map_file(self._path))

    # --- state ---

    def state(self) -> dict[str, int]:
        return {"length": self.length, "cursor": self.cursor, "write_count": self.write_count}

    def load(self, state: dict[str, int]) -> None:
        self.length, self.cursor, self.write_count = state["length"], state["cursor"], state["write_count"]
        self.changed()

    def __repr__(self) -> str:
        return f"Counters(length={self.length}, cursor={self.cursor}, write_count={self.write_count})"


def _map_file(path: Path) -> Tensor:
    if not path.exists():
        raise RuntimeError(
            f"Counters: the counters of a shared buffer are a file of its owner: {path} does not exist (any more); the "
            "owner must live, on this machine, as long as others use the buffer."
        )
    return torch.from_file(str(path), shared=True, size=_WORDS, dtype=torch.int64)


def row_limit(who: str, max_size: int | None) -> int:
    """``max_size`` as a number; None is the largest int64."""
    if max_size is None:
        return torch.iinfo(torch.int64).max
    if max_size < 1:
        raise ValueError(f"{who}: max_size counts rows and must be at least 1: got {max_size}.")
    return max_size


class Storage(ABC):
    """Rows at positions ``0 .. len - 1``, at most ``max_size`` of them.

    Rows are copied on writes and on reads: a caller's data never shares memory with a row.

    With ``ndim`` dimensions the rows form a grid [T, E, ...] of ``columns`` parallel streams that are written at the
    same time. ``set``, ``get`` and ``entry`` address its *cells* by flat position ``t * columns + e``; ``len`` and
    ``max_size`` count cells. ``storage[...]`` indexes the grid.
    """

    max_size: int  # a property in storages where another process may set it
    ndim: int = 1
    trailing: tuple[int, ...] = ()  # the sizes of the grid's dimensions after time; may be a property too

    def __init__(self) -> None:
        self.counters = Counters()
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._checkpointer: Any = None  # None: the default of the class, when it is first used

    # --- rows ---

    @abstractmethod
    def set(self, index: Index, data: Any, *, set_cursor: bool = True) -> None:
        """Writes one row (int) or a batch of rows; new positions must follow the existing rows without a gap.

        ``set_cursor`` is ignored: the writer's cursor never changes.
        """

    @abstractmethod
    def get(self, index: Index) -> Any:
        """A copy of one row (int) or of a batch of rows. Raises: IndexError if there is none."""

    def count(self, data: Any) -> int:
        """The number of rows of a batch: the leading size, which all entries share, or the length of a list of rows."""
        if isinstance(data, list):
            return len(data)
        if type(data) is TensorDict or isinstance(data, Tensor) or is_tensor_collection(data):
            shape = data.shape
            if not shape:
                raise RuntimeError("extend: a batch has a leading dimension that counts rows: got a scalar; use add.")
            return shape[0]
        if is_tree(data):
            sizes = {self.count(leaf) for leaf in tree_leaves(data)}
            if len(sizes) != 1:
                raise RuntimeError(
                    f"extend: all entries of a {type(data).__name__} must have one leading size: got {sorted(sizes)}."
                )
            return sizes.pop()
        if isinstance(data, Iterable) and hasattr(data, "__len__"):
            return len(data)
        raise RuntimeError(f"extend: a batch is a tensor, tensordict, list, dict or tuple: got {type(data).__name__}.")

    def batch(self, index: slice | Tensor) -> Any:
        """``get`` for existing positions (a plain slice or int64[N]), stacked if possible."""
        return self.get(index)

    def entry(self, key: Key, index: Tensor) -> Tensor:
        """A copy of one entry of the rows at ``index``, int64[N].

        Raises: MissingKeyError if rows have no such entry.
        """
        rows = self.batch(index)
        return read_entry(type(self).__name__, rows, key)

    def has_entry(self, key: Key) -> bool:
        """True if the first row has this entry."""
        try:
            self.entry(key, torch.zeros(1, dtype=torch.int64))
        except MissingKeyError:
            return False
        return True

    def may_have(self, name: str) -> bool:
        """False if rows have a fixed schema without an entry of this name."""
        return True

    def __len__(self) -> int:
        return self.counters.length

    @property
    def is_full(self) -> bool:
        return self.counters.length >= self.max_size

    def empty(self) -> None:
        """Removes all rows; allocated memory and the schema are kept."""
        self.counters.check_writable(type(self).__name__)
        self.counters.length = 0
        self.counters.changed()

    def contains(self, index: int | Tensor) -> bool | Tensor:
        """True if there is a row at the position(s)."""
        if isinstance(index, Tensor):
            return (index >= -len(self)) & (index < len(self))
        return -len(self) <= index < len(self)

    def part(self, data: Any, start: int, end: int) -> Any:
        """The rows ``start .. end - 1`` of a batch."""
        if isinstance(data, list) or is_leaf(data):
            return data[start:end]
        return tree_map(lambda leaf: leaf[start:end], data)

    # --- the grid ---

    @property
    def columns(self) -> int:
        """The number of parallel streams: 1 unless ``ndim`` is larger."""
        return prod(self.trailing)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the grid: (rows,) for one dimension, else (time, *trailing)."""
        return (len(self) // self.columns, *self.trailing)

    def prepare(self, trailing: tuple[int, ...]) -> None:  # noqa: B027  most storages have one dimension
        """Sets the sizes of the grid's dimensions after time, which the first write fixes."""

    def __getitem__(self, index: Any) -> Any:
        """A copy of the rows at an index of the grid, time first: ``storage[:]`` is [T, E, ...]."""
        cells = select_cells(index, self.shape, type(self).__name__)
        if isinstance(cells, int | slice):
            return self.get(cells)
        return shape_cells(self.get(cells.reshape(-1)), cells.shape)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Writes rows at an index of the grid, time first; with one dimension also after the last row."""
        if self.ndim == 1:
            return self.set(index, data)
        cells = select_cells(index, self.shape, type(self).__name__)
        self.set(*cells_in_row(cells, data))

    def __contains__(self, index: int | Tensor) -> bool:
        """True if there is a row at the position, or at every position of a tensor."""
        there = self.contains(index)
        return bool(there.all()) if isinstance(there, Tensor) else there

    def attach(self, buffer: Any) -> None:
        """Always raises UnsupportedError: samplers detect writes in the storage's counters."""
        raise UnsupportedError(
            f"{type(self).__name__}: nothing needs to be attached: samplers detect writes by any buffer or process in "
            "the storage's counters; to report which rows of a buffer were changed, call its mark_update(index)."
        )

    # --- several processes ---

    @property
    def shared(self) -> bool:
        """True if other processes may read and write these rows."""
        return self.counters.shared

    def share(self) -> None:
        """Moves the rows to memory that other processes can map; call it before they receive the storage."""
        raise UnsupportedError(
            f"{type(self).__name__}: its rows are Python objects of one process and cannot be shared; use "
            "LazyTensorStorage(...).share() or LazyMemmapStorage, or keep the buffer in one process."
        )

    def check_hand_over(self) -> None:
        """Raises RuntimeError if another process would receive a separate copy instead of these rows."""
        if not self.shared:
            raise RuntimeError(
                f"{type(self).__name__}: a storage reaches another process by shared memory only: got one that is not "
                "shared; use LazyMemmapStorage, or call share() first (LazyTensorStorage, TensorStorage), or give the "
                "other process a function that builds its own. To save it use dumps or state_dict."
            )

    def __reduce_ex__(self, protocol: int) -> Any:
        if get_spawning_popen() is not None:
            self.check_hand_over()
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock" or self.shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "lock" not in state:
            self.lock = threading.RLock()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The rows and the counters, as copies."""
        content, counters = self.snapshot()
        return {"content": content, "ring": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces rows and counters by a copy of a state. Raises as ``restore`` does, with nothing changed."""
        self._check_keys("state", state, {"content", "ring"})
        self.restore(state["content"], state["ring"])

    def snapshot(self, *, copy: bool = True) -> tuple[Any, dict[str, Any]]:
        """The content of a checkpoint: the rows in the order of positions ([T, E, ...] on a grid) and the counters.

        The rows are None if the storage is empty. They are a copy unless ``copy`` is False, which is for callers that
        neither change nor keep them: the rows may be larger than memory.
        """
        return (self._all_rows(copy) if len(self) else None), self._counter_state()

    def restore(self, content: Any, counters: dict[str, Any]) -> None:
        """Replaces rows and counters by a copy of what ``snapshot`` returned.

        Raises: CheckpointError, with nothing changed, if the snapshot has another number of dimensions or does not fit.
        """
        self._check_keys("snapshot", counters, self._counter_state().keys())
        if counters["ndim"] != self.ndim:
            raise CheckpointError(
                f"{type(self).__name__}: a snapshot must have the storage's number of dimensions: got ndim="
                f"{counters['ndim']}, expected {self.ndim}."
            )
        # Below, lists of rows are replaced, not changed, and tensors are checked before they are written, so restoring
        # the old attributes undoes everything.
        length, before, rows_before = counters["length"], self.counters.length, dict(self.__dict__)
        try:
            self.prepare(tuple(counters["trailing"]))
            if length > self.max_size or (length >= counters["max_size"] and counters["max_size"] != self.max_size):
                raise CheckpointError(  # a full ring can only continue at its original size
                    f"{type(self).__name__}: the state must be of a storage of the same size: got {length} rows of "
                    f"max_size {counters['max_size']}, expected max_size {self.max_size}."
                )
            self._forget()
            self.counters.length = 0
            if length:
                rows = time_first(content, 0, self.ndim)[0]
                if self.count(rows) != length:
                    raise CheckpointError(
                        f"{type(self).__name__}: a snapshot's rows must match its length: got {self.count(rows)}, "
                        f"expected {length}."
                    )
                self.set(slice(0, length), rows)
        except BaseException:
            self.__dict__.update(rows_before)
            self.counters.length = before
            raise
        self.counters.load(counters)  # last, because the write above has changed the counters

    def register_save_hook(self, hook: Callable[[Any], Any]) -> None:
        """Registers ``hook``, which converts the content before it is written to disk."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[[Any], Any]) -> None:
        """Registers ``hook``, which converts the content after it is read from disk."""
        self.checkpointer.register_load_hook(hook)

    def dumps(self, path: str | Path) -> None:
        """Writes the rows and counters to the directory ``path`` with ``checkpointer``."""
        with self.lock:
            self.checkpointer.dumps(self, path)

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote."""
        with self.lock:
            self.checkpointer.loads(self, path)

    @property
    def checkpointer(self) -> Any:
        """Writes and reads the rows for ``dumps`` and ``loads``; by default ``checkpointers.default_for(storage)``."""
        if self._checkpointer is None:
            from llmrl.data.replay_buffers.checkpointers.base import default_for  # checkpointers import the storages

            self._checkpointer = default_for(self)
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def _counter_state(self) -> dict[str, Any]:
        return {**self.counters.state(), "max_size": self.max_size, "ndim": self.ndim, "trailing": list(self.trailing)}

    def _check_keys(self, what: str, state: dict[str, Any], expected: Set[str]) -> None:
        if missing := expected - state.keys():
            raise CheckpointError(
                f"{type(self).__name__}: not a storage {what}: missing keys {sorted(missing)}, got {sorted(state)}."
            )

    # --- for subclasses ---

    def _all_rows(self, copy: bool) -> Any:
        return self[:]

    def _forget(self) -> None:  # noqa: B027  preallocated memory is kept
        """Releases the rows by replacing their containers, never by changing them: ``restore`` may put them back."""

    def _rows_at(self, index: Index) -> int | slice | Tensor:
        """Normalises an index of existing rows to a position, a slice, or int64[N]."""
        where = select_cells(index, (len(self),), type(self).__name__)
        return where.reshape(-1) if isinstance(where, Tensor) else where

    def _places_at(self, index: Index) -> int | slice | Tensor:
        """Normalises an index of rows to write, which may be new, to a position, a slice, or a tensor."""
        if type(index) is int and index >= 0:
            return index
        if type(index) is slice:  # fast path for a writer's slice: appending a batch skips the checks below
            plain = type(index.start) is int and type(index.stop) is int and index.step in (None, 1)
            if plain and 0 <= index.start <= index.stop:
                return index
        who, length = type(self).__name__, len(self)
        if isinstance(index, slice):
            index = range(*index.indices(max(length, index.stop or 0)))  # the slice may end after the last row
        if isinstance(index, range) and index.step == 1 and 0 <= index.start <= index.stop:
            return slice(index.start, index.stop)
        if not isinstance(index, Tensor):
            index = list(index) if isinstance(index, range) else index
            index = torch.tensor(index, dtype=None if index != [] else torch.int64)
        if index.dtype is torch.bool:
            if index.ndim != 1 or len(index) not in (length, self.max_size):
                raise IndexError(
                    f"{who}: a mask must have one entry per row: got {list(index.shape)}, {length} rows of at most "
                    f"{self.max_size}."
                )
            return index.nonzero().squeeze(1)
        if index.numel() and int(index.min()) < 0:
            if int(index.min()) < -length:
                raise IndexError(f"{who}: positions must lie in the {length} rows, or follow them: got {index}.")
            index = torch.where(index < 0, index + length, index)
        return index if index.ndim else int(index)

    def _check_run(self, where: Sequence[int], num_rows: int) -> None:
        """Raises unless there is one position per row and writing them in this order leaves no gap."""
        if len(where) != num_rows:
            raise IndexError(
                f"{type(self).__name__}: one position per row is needed: got {len(where)} positions, {num_rows} rows."
            )
        if isinstance(where, range):
            return self._check_place(where.start, where.stop, len(self))
        length = len(self)
        for position in where:
            self._check_place(position, position + 1, length)
            length = max(length, position + 1)

    def _check_place(self, first: int, end: int, length: int) -> None:
        """Raises unless rows at ``first .. end - 1`` fit and follow the ``length`` rows without a gap."""
        if end > self.max_size:
            raise RuntimeError(f"{type(self).__name__}: positions end at max_size={self.max_size}: got {end - 1}.")
        if first > length:
            raise RuntimeError(
                f"{type(self).__name__}: rows are written without gaps: got position {first}, expected at most "
                f"{length}."
            )


def read_entry(who: str, rows: Any, key: Key) -> Any:
    """One entry of a batch (a tensordict, or nested dicts of tensors); a list if its rows differ in shape or dtype."""
    path = (key,) if isinstance(key, str) else tuple(key)
    value = rows
    for depth, name in enumerate(path):
        known = list(value.keys()) if isinstance(value, dict) or is_tensor_collection(value) else []
        if name not in known:
            raise missing_entry(who, path, path[:depth], known)
        last = depth == len(path) - 1
        value = value.get(name, as_list=True) if last and is_tensor_collection(value) else value[name]
    if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
        return torch.stack(value) if len({(part.shape, part.dtype) for part in value}) == 1 else value
    return value


def missing_entry(who: str, path: tuple[str, ...], inside: tuple[str, ...], known: Sequence[str]) -> MissingKeyError:
    where = f" under {inside!r}" if inside else ""
    return MissingKeyError(
        f"{who}: rows have no entry {path if len(path) > 1 else path[0]!r}; there is{where}: "
        f"{', '.join(map(str, known)) or 'nothing with a key'}.{did_you_mean(str(path[len(inside)]), map(str, known))}"
    )
