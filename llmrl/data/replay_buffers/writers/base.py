"""Writers: choose the positions of new rows in the storage and count the writes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.ragged.stack import with_entry
from llmrl.data.replay_buffers.grid_index import coordinates
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.utils import StateFile


class Writer(StateFile, ABC):
    """Writes rows into its registered storage, which also holds the cursor and the write count (``counters``).

    ``compilable`` has no effect: a buffer's ``add`` and ``extend`` run eagerly even inside compiled functions.
    """

    def __init__(self, compilable: bool = False) -> None:
        self._storage: Storage | None = None

    def register_storage(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            raise RuntimeError(f"{type(self).__name__}: a storage must be registered before the first write.")
        return self._storage

    @property
    def cursor(self) -> int:
        """The position of the next row."""
        return self.storage.counters.cursor

    @property
    def write_count(self) -> int:
        """The number of rows ever written."""
        return self.storage.counters.write_count

    @abstractmethod
    def add(self, data: Any) -> int:
        """Writes one row and returns its position."""

    @abstractmethod
    def extend(self, data: Any) -> Tensor:
        """Writes a batch and returns the position of every row, int64[N]."""

    def as_stored(self, data: Any, index: int | Tensor) -> Any:
        """Converts rows to the form to store at these positions (int: one row). Raises for rows it rejects."""
        return data

    def empty(self, empty_write_count: bool = True) -> None:
        """Moves the cursor back to the first position."""
        self.storage.counters.cursor = 0
        if empty_write_count:
            self.storage.counters.write_count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "write_count": self.write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.storage.counters.cursor = state["cursor"]
        self.storage.counters.write_count = state["write_count"]


class RoundRobinWriter(Writer):
    """Writes at a cursor that wraps at the end of the storage, which keeps the newest ``max_size`` rows.

    If a batch is longer than the storage, its later rows overwrite earlier ones, with a warning, and positions repeat.

    >>> from llmrl.data.replay_buffers import ListStorage
    >>> writer, storage = RoundRobinWriter(), ListStorage(5)
    >>> writer.register_storage(storage)
    >>> writer.extend([0, 1, 2]).tolist(), writer.extend([3, 4, 5, 6]).tolist()
    ([0, 1, 2], [3, 4, 0, 1])
    >>> storage.get(slice(0, 5)), writer.cursor
    ([5, 6, 2, 3, 4], 2)
    """

    def add(self, data: Any) -> int:
        storage = self.storage
        counters, index = storage.counters, storage.counters.cursor
        storage.set(index, self.as_stored(data, index))
        counters.cursor = (index + 1) % storage.max_size
        counters.write_count += 1
        return index

    def extend(self, data: Any) -> Tensor:
        storage = self.storage
        counters, size, count = storage.counters, storage.max_size, storage.count(data)
        if not count:
            raise RuntimeError(f"{type(self).__name__}: a batch must have at least one row: got none.")
        start = counters.cursor
        end = start + count
        index = np.arange(start, end)  # torch.arange would take as long as all checks of a batch
        index = torch.from_numpy(index if end <= size else index % size)
        data = self.as_stored(data, index)
        if end <= size:
            storage.set(slice(start, end), data)
        else:
            self._wrap(start, count, data)
        counters.cursor = end % size  # after the rows: a write that raises must not move the cursor
        counters.write_count += count
        return index

    def _wrap(self, start: int, count: int, data: Any) -> None:
        storage = self.storage
        size = storage.max_size
        skip = max(0, count - size)  # rows that later ones of the same batch would replace
        if skip:
            warnings.warn(
                f"{type(self).__name__}: {count} rows were written at once into a storage of {size}: the first {skip} "
                f"are lost; give the storage a max_size of at least {count}.",
                stacklevel=5,
            )
        start = (start + skip) % size
        head = size - start
        runs = [
            (slice(start, size), storage.part(data, skip, skip + head)),
            (slice(0, count - skip - head), storage.part(data, skip + head, count)),
        ]
        if skip:  # the storage may be empty: fill it from position 0, so that the first write leaves no gap
            runs.reverse()
        for run, rows in runs:
            if run.stop > run.start:
                storage.set(run, rows)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` for tensordicts that also writes each row's position into its entry ``"index"``.

    If the storage has a fixed schema without that entry, as a given allocation may, rows are stored without it.
    """

    def as_stored(self, data: Any, index: int | Tensor) -> Any:
        return with_index(data, index, self.storage)


def with_index(data: Any, index: int | Tensor, storage: Storage) -> Any:
    """The rows (int: one row) with an entry ``"index"``: a position per row, or coordinates on a grid.

    The entry is expanded to the batch dimensions of a row and left out if the storage's schema lacks it. The caller's
    rows are not changed.
    """
    if not storage.may_have("index"):
        if isinstance(data, list):
            return [row.exclude("index") for row in data]
        return data.exclude("index") if "index" in data.keys() else data
    return _with_index(data, index, storage.trailing)


def _with_index(data: Any, index: int | Tensor, trailing: Sequence[int]) -> Any:
    if isinstance(data, list):
        return [_with_index(row, position, trailing) for row, position in zip(data, index.tolist(), strict=True)]
    single = isinstance(index, int)
    where = torch.full((), index) if single else index
    where = coordinates(where, trailing) if trailing else where
    inside = data.batch_size if single else data.batch_size[1:]
    if inside:
        rows, after = where.shape[: 0 if single else 1], where.shape[0 if single else 1 :]
        where = where.view(*rows, *[1] * len(inside), *after).expand(*rows, *inside, *after)
    return with_entry(data, "index", where)
