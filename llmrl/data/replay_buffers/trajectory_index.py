"""The trajectory boundaries of a storage, updated incrementally at a cost proportional to the rows written.

The index keeps one number per row: its *age*, the number of rows of its trajectory up to and including it. Appending
rows never changes the ages of others, and ages answer every query: two rows of a stream belong to one trajectory if
their ages differ by as much as their times. A full ring continues from its physical end to its start; overwritten rows
no longer belong to their trajectory.

Legend: T time, E parallel streams (``storage.columns``); cell ``t * E + e`` of the storage. ``time`` counts rows of a
stream from 0, the oldest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.storages.base import Key, Storage
from llmrl.data.replay_buffers.write_journal import WriteJournal
from llmrl.errors import MissingKeyError

_TRAJ_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), "episode")
_END_KEY: Key = ("next", "done")
_CHUNK = 1 << 20


class TrajectoryIndex:
    """The trajectories of the storage that ``update`` was last called with.

    A trajectory ends where ``traj_key`` changes, or where ``end_key`` is True. With neither, ``("collector",
    "traj_ids")``, ``"episode"`` and ``("next", "done")`` (an end key) are tried in this order. For data that does not
    change, boundaries may be given as ``trajectories`` (an id per row) or ``ends`` (bool per row), in cell order.
    """

    def __init__(
        self,
        who: str,
        *,
        traj_key: Key | None = None,
        end_key: Key | None = None,
        trajectories: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> None:
        if trajectories is not None and ends is not None:
            raise TypeError(f"{who}: trajectories and ends exclude each other: got both.")
        if (trajectories is not None or ends is not None) and (traj_key is not None or end_key is not None):
            raise TypeError(f"{who}: boundaries come from tensors or from keys: got both.")
        self._who = who
        self._traj_key = traj_key
        self._end_key = end_key
        given = trajectories if ends is None else torch.as_tensor(ends).to(torch.bool)
        self._given = None if given is None else torch.as_tensor(given).cpu().numpy().reshape(-1)
        self._given_ends = ends is not None
        self.journal = WriteJournal()
        self.streams = 1
        self.length = 0  # T
        self._size = 1  # capacity of the ring in time steps
        self._oldest = 0  # the physical step of time 0
        self._ages = np.empty(0, dtype=np.int64)
        self._boundary: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
        self._outdated = False  # True once rows were written after boundaries were given as a tensor

    # --- queries; cells are int64[N] ---

    @property
    def cells(self) -> int:
        return self.length * self.streams

    def time(self, cells: np.ndarray) -> np.ndarray:
        step = cells if self.streams == 1 else cells // self.streams
        return (step - self._oldest) % self._size if self._oldest else step

    def at(self, time: np.ndarray, stream: np.ndarray | int = 0) -> np.ndarray:
        return (time + self._oldest) % self._size * self.streams + stream

    def ahead(self, cells: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        """The cells ``steps`` later in the same stream (earlier, if negative)."""
        there = cells + (steps if self.streams == 1 else steps * self.streams)
        return there % (self._size * self.streams) if self._oldest else there

    def rows_up_to(self, cells: np.ndarray) -> np.ndarray:
        """The number of rows of its trajectory up to and including each cell."""
        # The age also counts rows that the ring has overwritten since.
        return np.minimum(self._ages[cells], self.time(cells) + 1)

    def same(self, cells: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        """True if the trajectory of a cell continues for ``steps`` more rows."""
        inside = self.time(cells) + steps < self.length
        there = np.where(inside, self.ahead(cells, steps), cells)
        return inside & (self._ages[there] - self._ages[cells] == steps)

    def is_last(self, cells: np.ndarray) -> np.ndarray:
        """True for the last cell of each trajectory so far."""
        return ~self.same(cells, 1)

    def rows_from(self, cells: np.ndarray, limit: int) -> np.ndarray:
        """The number of rows of its trajectory from each cell on, including it; at most ``limit`` are counted."""
        # Binary search works because a trajectory that continues for n steps also continues for fewer.
        rows = np.ones(cells.size, dtype=np.int64)
        step = 1 << max(limit - 1, 1).bit_length() - 1
        while step:
            more = np.minimum(step, limit - rows)
            rows = np.where((more > 0) & self.same(cells, rows - 1 + more), rows + more, rows)
            step //= 2
        return rows

    def lasts(self) -> np.ndarray:
        """The last cell of every trajectory, by stream and time."""
        cells = self.at(np.arange(self.length)[None, :], np.arange(self.streams)[:, None]).reshape(-1)
        return cells[self.is_last(cells)]

    # --- updates ---

    def update(self, storage: Storage) -> bool:
        """Includes rows written since the last call; True if there were any.

        Raises: MissingKeyError without an entry that marks boundaries, RuntimeError if it is not one value per row.
        """
        changes = self.journal.take(storage)
        if self._given is not None and changes is not None and changes[0].size:
            self._outdated = True
        if self._outdated:
            raise RuntimeError(
                f"{self._who}: boundaries given as a tensor are for rows that do not change: rows were written since; "
                "use traj_key or end_key."
            )
        if changes is not None and not changes[0].size and not changes[1].size:
            return False
        try:
            if changes is None or not self._append(storage, changes[0]) or not self._agrees(storage, changes[1]):
                self._rebuild(storage)
        except BaseException:
            self.journal.forget()  # its rows are not in the index: the next update must rebuild everything
            raise
        return True

    def forget(self) -> None:
        """Clears the index; the next ``update`` rebuilds it from all rows."""
        self.journal.forget()
        self.length, self._outdated = 0, False

    def __getstate__(self) -> dict[str, object]:
        kept = ("_who", "_traj_key", "_end_key", "_given", "_given_ends")
        return {name: getattr(self, name) for name in kept}  # the rest is rebuilt from the storage

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__("")
        self.__dict__.update(state)

    def _rebuild(self, storage: Storage) -> None:
        self._boundary = self._find_boundary(storage)
        self.streams, cells = storage.columns, len(storage)
        self._size = storage.max_size // self.streams
        self._oldest = storage.counters.cursor // self.streams if storage.is_full else 0
        self._ages = _room(self._ages, cells)
        self.length = 0
        total = cells // self.streams
        chunk = max(1, _CHUNK // self.streams)
        for start in range(0, total, chunk):  # in chunks, to bound memory
            self._extend(storage, np.arange(start, min(start + chunk, total)))

    def _append(self, storage: Storage, written: np.ndarray) -> bool:
        """Adds the newest rows; False if they do not continue the ring, which requires a rebuild."""
        streams, count = self.streams, written.size
        if not count:
            return True
        capacity = self._size * streams
        steps = count // streams
        expected = (written[0] + np.arange(count)) % capacity
        length = min(self.length + steps, self._size)
        if (
            storage.columns != streams
            or count >= capacity
            or count % streams
            or written[0] != int(self.at(np.int64(self.length)))
            or not np.array_equal(written, expected)
            or len(storage) != length * streams
            or storage.counters.cursor != (written[-1] + 1) % capacity
        ):
            return False
        self._ages = _room(self._ages, len(storage))
        times = np.arange(self.length, self.length + steps)
        overwritten = self.length + steps - length
        if overwritten:  # time 0 moves to the oldest remaining row, which shifts all times
            self._oldest = (self._oldest + overwritten) % self._size
            self.length -= overwritten
            times = times - overwritten
        self._extend(storage, times)
        return True

    def _extend(self, storage: Storage, times: np.ndarray) -> None:
        """Computes ages for the rows at ``times``, which directly follow the rows that have ages."""
        streams, first = self.streams, int(times[0])
        cells = self.at(times[:, None], np.arange(streams)[None, :])
        # 1. True where a row begins a trajectory; the first row of a stream always does.
        begin = np.ones(cells.shape, dtype=bool)
        before = self.at(np.arange(first - 1, first), np.arange(streams))
        if first:
            begin[:] = self._boundary(np.concatenate([before[None, :], cells[:-1]]), cells)
        elif times.size > 1:
            begin[1:] = self._boundary(cells[:-1], cells[1:])
        # 2. The age counts rows from the last beginning; rows before the first beginning continue the previous age.
        step = np.arange(times.size)[:, None]
        start = np.maximum.accumulate(np.where(begin, step, -1), 0)
        carried = self._ages[before][None, :] if first else 0
        self._ages[cells] = np.where(start >= 0, step - start + 1, step + 1 + carried)
        self.length = first + times.size

    def _agrees(self, storage: Storage, replaced: np.ndarray) -> bool:
        """True if the boundaries around replaced rows are unchanged."""
        if not replaced.size:
            return True
        replaced = np.unique(replaced[replaced < self.cells])
        time = self.time(replaced)
        # A row affects two boundaries: the one before it, and the one before the next row.
        after = self.ahead(replaced[time + 1 < self.length], 1)
        cells = np.unique(np.concatenate([replaced[time > 0], after]))
        if not cells.size:
            return True  # rows without neighbours
        begin = self._boundary(self.ahead(cells, -1), cells)
        return bool((begin == (self._ages[cells] == 1)).all())

    # --- boundaries: True if the second of two neighbours begins a trajectory ---

    def _find_boundary(self, storage: Storage) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        if self._given is not None:
            given, length = self._given, len(storage)
            if given.size != length:
                raise RuntimeError(
                    f"{self._who}: boundaries given as a tensor need one value per row: got {given.size} for {length}."
                )
            if self._given_ends:
                return lambda before, cells: given[before]
            return lambda before, cells: given[before] != given[cells]
        traj_key, end_key = self._traj_key, self._end_key
        if traj_key is None and end_key is None:
            traj_key, end_key = self._default_keys(storage)

        def boundary(before: np.ndarray, cells: np.ndarray) -> np.ndarray:
            begin = np.zeros(cells.shape, dtype=bool)
            if traj_key is not None:
                begin |= _changes(lambda where: self._read(storage, traj_key, where), before, cells)
            if end_key is not None:
                begin |= self._read(storage, end_key, before.reshape(-1)).astype(bool).reshape(cells.shape)
            return begin

        return boundary

    def _default_keys(self, storage: Storage) -> tuple[Key | None, Key | None]:
        for key in (*_TRAJ_KEYS, _END_KEY):
            if storage.has_entry(key):
                return (None, key) if key == _END_KEY else (key, None)
        raise MissingKeyError(
            f"{self._who}: rows must tell where trajectories end: got no entry {', '.join(map(repr, _TRAJ_KEYS))} or "
            f"{_END_KEY!r}; name one by traj_key or end_key."
        )

    def _read(self, storage: Storage, key: Key, cells: np.ndarray) -> np.ndarray:
        values = storage.entry(key, torch.from_numpy(cells))
        values = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if values.size != cells.size:
            raise RuntimeError(
                f"{self._who}: {key!r} must be one value per row, so that it can tell where trajectories end: got "
                f"{list(values.shape)} for {cells.size} rows."
            )
        return values.reshape(-1)


def _changes(read: Callable[[np.ndarray], np.ndarray], before: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """True where the value at ``cells`` differs from that at ``before``; each cell is read once."""
    if cells.ndim == 2:  # [T, E]; ``before`` is the same cells one step earlier
        values = read(np.concatenate([before[:1], cells]).reshape(-1)).reshape(-1, cells.shape[1])
        return values[1:] != values[:-1]
    values = read(np.concatenate([before, cells]))
    return values[before.size :] != values[: before.size]


def _room(ages: np.ndarray, cells: int) -> np.ndarray:
    if cells <= ages.size:
        return ages
    grown = np.zeros(max(cells, 2 * ages.size), dtype=np.int64)  # doubled, so that growing row by row is linear
    grown[: ages.size] = ages
    return grown
