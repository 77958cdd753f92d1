"""A journal of writes into a storage, for samplers that keep something about every row.

Two sources agree here: the calls of the buffer (``add``, ``extend``, ``mark_update``), and the counters of
the storage, which also move when another process writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage

_LIMIT = 1 << 16  # noted rows; a process that only writes must not collect positions without end
_NONE = np.empty(0, dtype=np.int64)


class _Positions:
    """Positions in the order in which they were noted; ``parts`` is None once they are too many."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] | None = []
        self.count = 0

    def add(self, index: int | Tensor) -> None:
        where = flat_positions(index)
        self.count += where.size
        if self.count > _LIMIT:
            self.parts = None
        else:
            self.parts.append(where)

    def joined(self) -> np.ndarray:
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts) if self.parts else _NONE


class _Seen(NamedTuple):
    write_count: int
    cursor: int
    length: int
    mutations: int


class WriteJournal:
    """Collects positions that were written or replaced, until ``take`` asks for them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """From here on nothing is known: the next ``take`` answers None."""
        self._storage: Storage | None = None
        self._seen: _Seen | None = None
        self._written, self._replaced = _Positions(), _Positions()

    def note(self, index: int | Tensor) -> None:
        """Rows were written at these positions, in this order."""
        self._written.add(index)

    def note_replaced(self, index: int | Tensor) -> None:
        """Rows at these positions were changed in place."""
        self._replaced.add(index)

    def take(self, storage: Storage) -> tuple[np.ndarray, np.ndarray] | None:
        """The positions written and those replaced since the last call, int64[N] each, in the order of writing.

        None if the rows may all be others: at the first call, with another storage, after a load.
        """
        counters = storage.counters
        seen = self._seen if storage is self._storage else None
        written, replaced = self._written, self._replaced
        noted = written.count + replaced.count
        if seen and seen.mutations == counters.mutations and not noted:
            return _NONE, _NONE
        now = _Seen(counters.write_count, counters.cursor, counters.length, counters.mutations)
        self.forget()
        self._storage, self._seen = storage, now
        if seen is None or replaced.parts is None:
            return None
        if written.parts is not None and written.count >= now.write_count - seen.write_count >= 0:
            if now.mutations != seen.mutations and not noted:
                return None  # changed without a note of where
            return written.joined(), replaced.joined()
        run = _run(seen, now, storage.max_size)
        return None if run is None else (run, replaced.joined())

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy has seen nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forget()


def _run(seen: _Seen, now: _Seen, size: int) -> np.ndarray | None:
    """The positions that a ring wrote between two states of its counters; None if it wrote all, or was not a ring."""
    delta = now.write_count - seen.write_count
    if (
        not 0 < delta < size
        or (seen.cursor + delta) % size != now.cursor
        or now.length != min(size, seen.length + delta)
    ):
        return None
    return (seen.cursor + np.arange(delta)) % size


def flat_positions(index: int | Tensor | None) -> np.ndarray:
    """Positions as a copy, int64[N], without the -1 (or None) of rows that a writer rejected."""
    if index is None or isinstance(index, int):
        return _NONE if index is None or index < 0 else np.array([index], dtype=np.int64)
    where = index.detach().cpu().numpy().reshape(-1)
    return where[where >= 0]
