"""The journal of written positions, from which samplers and trajectory indices learn what changed in a storage."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage

_LIMIT = 1 << 16  # most rows to record: bounds the memory of a process that writes and never samples
_NO_ROWS = np.empty(0, dtype=np.int64)


class _Seen(NamedTuple):
    write_count: int
    cursor: int
    length: int
    mutations: int


class WriteJournal:
    """Collects positions that were written or replaced, until ``take`` is called.

    It combines two sources: the buffer's calls (``add``, ``extend``, ``mark_update``), and the storage's counters,
    which also change when another process writes.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Clears the journal; the next ``take`` returns None."""
        self._storage: Storage | None = None
        self._seen: _Seen | None = None
        self._written: list[np.ndarray] = []
        self._replaced: list[np.ndarray] = []
        self._num_written = self._num_replaced = 0

    def note(self, index: int | Tensor) -> None:
        """Records that rows were written at these positions, in this order."""
        where = flat_positions(index)
        self._num_written += where.size
        if self._num_written <= _LIMIT:  # beyond the limit ``take`` derives the positions from the counters
            self._written.append(where)

    def note_replaced(self, index: int | Tensor) -> None:
        """Records that rows at these positions were changed in place."""
        where = flat_positions(index)
        self._num_replaced += where.size
        if self._num_replaced <= _LIMIT:
            self._replaced.append(where)

    def take(self, storage: Storage) -> tuple[np.ndarray, np.ndarray] | None:
        """The positions written and those replaced since the last call, int64[N] each, in the order of writing.

        None if all rows may have changed: at the first call, with another storage, after a load.
        """
        counters = storage.counters
        seen = self._seen if storage is self._storage else None
        num_written, num_replaced = self._num_written, self._num_replaced
        is_noted = bool(num_written or num_replaced)
        if seen and seen.mutations == counters.mutations and not is_noted:
            return _NO_ROWS, _NO_ROWS
        now = _Seen(counters.write_count, counters.cursor, counters.length, counters.mutations)
        written, replaced = self._written, self._replaced
        self.forget()
        self._storage, self._seen = storage, now
        if seen is None or num_replaced > _LIMIT:
            return None
        # The records are complete if they have at least as many rows as the write count increased by.
        if _LIMIT >= num_written >= now.write_count - seen.write_count >= 0:
            if now.mutations != seen.mutations and not is_noted:
                return None  # changed at unrecorded positions
            return _joined(written), _joined(replaced)
        run = _run(seen, now, storage.max_size)  # another process wrote too, or the limit was exceeded
        return None if run is None else (run, _joined(replaced))

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy starts empty

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forget()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NO_ROWS


def _run(seen: _Seen, now: _Seen, size: int) -> np.ndarray | None:
    """The positions written between two states of a ring's counters; None if all were, or they do not fit a ring."""
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
        return _NO_ROWS if index is None or index < 0 else np.array([index], dtype=np.int64)
    where = index.detach().cpu().numpy().reshape(-1)
    return where[where >= 0]
