"""The sampler, which picks the positions of the next batch from its own generator; uniform draws.

What a sampler knows about rows it keeps up to date by a `WriteJournal`; one that draws without replacement goes through
an `Epoch` at a time.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.directory import StateFile
from llmrl.data.replay_buffers.samplers.eligibility import Eligibility
from llmrl.data.replay_buffers.storages import Storage

_LIMIT = 1 << 16  # noted rows; a process that only writes must not collect positions without end
_NONE = np.empty(0, dtype=np.int64)
_ABSENT, _WAITING, _DRAWN = 0, 1, 2  # of a position in an epoch


class Sampler(StateFile, ABC):
    """Picks rows of a storage. Draws from its own generator, which is part of its state.

    A generator that is not given is seeded from torch's global one at the first draw, so ``torch.manual_seed`` makes a
    run repeatable, and what is drawn afterwards depends on nothing else.

    Positions are int64 and count cells, whatever the storage's ``ndim``. The buffer says what it wrote by ``add``,
    ``extend``, ``mark_update`` and ``empty``.
    """

    _generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        if self._generator is None:
            seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
            self._generator = torch.Generator().manual_seed(seed)
        return self._generator

    def set_rng(self, generator: torch.Generator) -> None:
        self._generator = generator

    @property
    def ran_out(self) -> bool:
        """True if the last batch ended a pass; never, for a sampler that has no passes."""
        return False

    @property
    def drop_last(self) -> bool:
        """True if every batch has exactly the size that was asked for."""
        return False

    @property
    def default_priority(self) -> float:
        """The priority of a row that was just written."""
        return 1.0

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """The positions of the next batch, int64[N], and what is to be known about them: tensors [N, ...] by key."""

    def add(self, index: int | Tensor) -> None:
        """A row was written at ``index``."""
        self.extend(index)

    def extend(self, index: int | Tensor) -> None:
        """Rows were written at ``index``, int64[N], or one position."""

    def mark_update(self, index: int | Tensor) -> None:
        """The rows at ``index`` were changed in place."""

    def update_priority(self, index: int | Tensor, priority: float | Tensor) -> None:
        """The rows at ``index`` are to be drawn in proportion to ``priority``."""
        warnings.warn(f"{type(self).__name__} has no priorities: update_priority has no effect.", stacklevel=2)

    def check_priority(self, priority: Tensor) -> None:
        """Raises what ``update_priority`` would for the priorities [N, ...] of rows that are still to be written."""

    def empty(self) -> None:
        """The storage was emptied."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def bookmark(self) -> Any:
        """The place in the draws; cheaper than a state, but good only until rows are written."""
        return self.state_dict()

    def go_back(self, bookmark: Any) -> None:
        """Takes the draws since ``bookmark`` back: they come again."""
        self.load_state_dict(bookmark)

    def _length(self, storage: Storage) -> int:
        length = len(storage)
        if not length:
            raise RuntimeError(f"{type(self).__name__}: there must be a row to draw: got an empty storage.")
        return length


class _Seen(NamedTuple):
    write_count: int
    cursor: int
    length: int
    mutations: int


class WriteJournal:
    """Collects positions that were written or replaced, until ``take`` asks for them.

    Two sources agree here: the calls of the buffer (``add``, ``extend``, ``mark_update``), and the counters of the
    storage, which also move when another process writes.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """From here on nothing is known: the next ``take`` answers None."""
        self._storage: Storage | None = None
        self._seen: _Seen | None = None
        self._written: list[np.ndarray] = []
        self._replaced: list[np.ndarray] = []
        self._num_written = self._num_replaced = 0

    def note(self, index: int | Tensor) -> None:
        """Rows were written at these positions, in this order."""
        where = flat_positions(index)
        self._num_written += where.size
        if self._num_written <= _LIMIT:
            self._written.append(where)

    def note_replaced(self, index: int | Tensor) -> None:
        """Rows at these positions were changed in place."""
        where = flat_positions(index)
        self._num_replaced += where.size
        if self._num_replaced <= _LIMIT:
            self._replaced.append(where)

    def take(self, storage: Storage) -> tuple[np.ndarray, np.ndarray] | None:
        """The positions written and those replaced since the last call, int64[N] each, in the order of writing.

        None if the rows may all be others: at the first call, with another storage, after a load.
        """
        counters = storage.counters
        seen = self._seen if storage is self._storage else None
        num_written, num_replaced = self._num_written, self._num_replaced
        is_noted = bool(num_written or num_replaced)
        if seen and seen.mutations == counters.mutations and not is_noted:
            return _NONE, _NONE
        now = _Seen(counters.write_count, counters.cursor, counters.length, counters.mutations)
        written, replaced = self._written, self._replaced
        self.forget()
        self._storage, self._seen = storage, now
        if seen is None or num_replaced > _LIMIT:
            return None
        if _LIMIT >= num_written >= now.write_count - seen.write_count >= 0:
            if now.mutations != seen.mutations and not is_noted:
                return None  # changed without a note of where
            return _joined(written), _joined(replaced)
        run = _run(seen, now, storage.max_size)
        return None if run is None else (run, _joined(replaced))

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy has seen nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forget()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NONE


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


class FilteredSampler(Sampler):
    """A sampler with the limits of ``Eligibility``; ``_eligible`` is None if none was asked for."""

    def __init__(
        self,
        *,
        max_age: int | None = None,
        max_uses: int | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
    ) -> None:
        limited = max_age is not None or max_uses is not None
        journal = WriteJournal()
        self._eligible = Eligibility(type(self).__name__, max_age, max_uses, version_key, journal) if limited else None

    @property
    def version(self) -> int | None:
        """The current policy version, which ages are counted from: as set, or the newest of any row seen so far."""
        return None if self._eligible is None else self._eligible.current_version

    @version.setter
    def version(self, version: int | None) -> None:
        if self._eligible is None or self._eligible.max_age is None:
            raise RuntimeError(f"{type(self).__name__}: a version is for a sampler with max_age: this one has none.")
        self._eligible.version = version

    def extend(self, index: int | Tensor) -> None:
        if self._eligible is not None:
            self._eligible.journal.note(index)

    def mark_update(self, index: int | Tensor) -> None:
        if self._eligible is not None:
            self._eligible.journal.note_replaced(index)

    def empty(self) -> None:
        if self._eligible is not None:
            self._eligible.empty()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._eligible is None else {**state, "eligible": self._eligible.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._eligible is not None and "eligible" in state:
            self._eligible.load_state_dict(state["eligible"])

    def bookmark(self) -> Any:
        return self.generator.get_state(), None if self._eligible is None else self._eligible.bookmark()

    def go_back(self, bookmark: Any) -> None:
        generator, uses = bookmark
        self.generator.set_state(generator)
        if self._eligible is not None:
            self._eligible.go_back(uses)


class RandomSampler(FilteredSampler):
    """Every row is as likely as any other at every draw. It has no passes, so iterating over it does not end.

    ``max_age`` leaves out rows whose ``version_key`` is more than that many policy versions behind ``sampler.version``
    (set by the trainer, or else the newest of any row so far). With ``max_uses`` a row is drawn at most so often until
    it is overwritten; each use that is left is then as likely as any other, and a batch is smaller than asked for if
    there are fewer. Raises: RuntimeError if no row may be drawn.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(max_age=1, max_uses=2), batch_size=4)
    >>> _ = buffer.extend(TensorDict(policy_version=torch.tensor([0, 1, 2]), batch_size=[3]))
    >>> buffer.sample()["policy_version"].sort().values
    tensor([1, 1, 2, 2])
    >>> buffer.sample()
    Traceback (most recent call last):
    RuntimeError: RandomSampler: there must be a row that may be drawn: got none of 3: 1 too old (max_age=1 at version \
2), 2 used up (max_uses=2); write new rows.
    """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length, eligible = self._length(storage), self._eligible
        if eligible is None:
            return torch.randint(length, (batch_size,), generator=self.generator), {}
        rows = np.flatnonzero(eligible.mask(storage))
        if not rows.size:
            raise eligible.nothing_left(storage)
        if eligible.max_uses is None:
            index = rows[torch.randint(rows.size, (batch_size,), generator=self.generator).numpy()]
        else:
            uses = eligible.uses_left(rows).cumsum()
            draws = torch.randperm(int(uses[-1]), generator=self.generator)[:batch_size].numpy()
            index = rows[np.searchsorted(uses, draws, side="right")]
            eligible.use(index)
        return torch.from_numpy(index), {}


class Epoch:
    """Hands out positions in a given order, each once, but for those that were dropped before their turn.

    >>> epoch = Epoch(np.array([2, 0, 3, 1]))
    >>> epoch.take(1), epoch.left
    (array([2]), 3)
    >>> epoch.drop(np.array([2, 3, 8]))
    >>> epoch.take(5), epoch.left
    (array([0, 1]), 0)
    """

    def __init__(self, order: np.ndarray) -> None:
        self._order = order
        self.place = 0
        self._status: np.ndarray | None = None  # of each position; needed once some are dropped
        self.left = order.size

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` positions, or as many as are left."""
        if self._status is None:
            part = self._order[self.place : self.place + count].copy()  # the caller may write to it
            self.place += part.size
            self.left -= part.size
            return part
        parts: list[np.ndarray] = []
        while count and self.left:
            part = self._order[self.place : self.place + count]
            self.place += part.size
            part = part[self._status[part] == _WAITING]
            self._status[part] = _DRAWN
            self.left -= part.size
            count -= part.size
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self._order[:0]

    def drop(self, positions: np.ndarray) -> None:
        """These positions are not to be handed out any more; those that were, or never were to be, do not matter."""
        if not self.left or not positions.size:
            return
        if self._status is None:
            self._status = np.full(int(self._order.max()) + 1, _ABSENT, dtype=np.uint8)
            self._status[self._order] = _WAITING
            self._status[self._order[: self.place]] = _DRAWN
        known = positions[positions < self._status.size]
        waiting = np.unique(known[self._status[known] == _WAITING])
        self._status[waiting] = _ABSENT
        self.left -= waiting.size

    def waiting(self) -> np.ndarray:
        """The positions still to be handed out, in order."""
        rest = self._order[self.place :]
        return rest if self._status is None else rest[self._status[rest] == _WAITING]

    def go_back(self, place: int) -> Epoch:
        """Takes back what was handed out since ``place``, if nothing was dropped since; returns the epoch."""
        again = self._order[place : self.place]
        if self._status is not None:
            again = again[self._status[again] == _DRAWN]
            self._status[again] = _WAITING
        self.place = place
        self.left += again.size
        return self


class EpochSampler(Sampler):
    """Goes through an `Epoch`, then through the next one. A position that is overwritten leaves the one it is in."""

    def __init__(self, drop_last: bool, shuffle: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._drop_last = drop_last
        self.shuffle = shuffle
        self._end()

    def _end(self) -> None:
        self._epoch = Epoch(np.empty(0, dtype=np.int64))
        self._ran_out = False

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    @property
    def drop_last(self) -> bool:
        return self._drop_last

    def _take(self, count: int, begin: Callable[[], np.ndarray]) -> np.ndarray:
        """The next positions of the pass; ``begin`` says which ones another pass has, where this one is over."""
        if self._too_short(count):
            rows = begin()
            if self.shuffle:
                rows = rows[torch.randperm(rows.size, generator=self.generator).numpy()]
            self._epoch = Epoch(rows)
        taken = self._epoch.take(count)
        self._ran_out = self._too_short(count)
        return taken

    def _too_short(self, count: int) -> bool:
        return self._epoch.left < (count if self._drop_last else 1)

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        if self._epoch.left:
            self._epoch.drop(flat_positions(index))
            self._ran_out = self._ran_out or not self._epoch.left

    def empty(self) -> None:
        super().empty()
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "remaining": torch.from_numpy(self._epoch.waiting().copy()),
            "ran_out": self._ran_out,
            "drop_last": self._drop_last,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._epoch = Epoch(state["remaining"].numpy().copy())
        self._ran_out = state["ran_out"]
        self._drop_last = state["drop_last"]
        self.shuffle = state["shuffle"]

    def bookmark(self) -> Any:
        return super().bookmark(), self._epoch, self._epoch.place, self._ran_out

    def go_back(self, bookmark: Any) -> None:
        draws, epoch, place, self._ran_out = bookmark
        super().go_back(draws)
        self._epoch = epoch.go_back(place)


class SamplerWithoutReplacement(EpochSampler, FilteredSampler):
    """Draws every row exactly once per pass, in random order (``shuffle=False``: in the order of positions).

    A pass is one permutation of the rows that were there when it began. Rows written meanwhile join the next pass: new
    positions are not in the permutation, and a position overwritten before it was drawn leaves it. The last batch of a
    pass holds what is left, or is dropped with ``drop_last``. State: what is left in order, and the generator: a run
    that is resumed in the middle of a pass goes on with the same batches.

    ``max_age`` is as in `RandomSampler`, also of rows that get too old during a pass. ``max_uses`` is the number of
    passes that a row is in before it is overwritten. Raises: RuntimeError if no row may be drawn.
    """

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        max_age: int | None = None,
        max_uses: int | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
    ) -> None:
        super().__init__(drop_last, shuffle, max_age=max_age, max_uses=max_uses, version_key=version_key)
        self._journal = WriteJournal()
        self._loaded = False  # the pass is of a loaded state: the rows are known to be those it was made for

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length, eligible = self._length(storage), self._eligible
        changes, loaded, self._loaded = self._journal.take(storage), self._loaded, False
        if changes is not None:
            self._epoch.drop(changes[0])  # by another process; what this one wrote has left the pass already
        elif not loaded:
            self._end()
        allowed = None
        if eligible is not None:
            allowed = eligible.mask(storage)
            if not allowed.any():
                raise eligible.nothing_left(storage)
            self._epoch.drop(np.flatnonzero(~allowed))
        index = self._take(batch_size, lambda: self._rows(length, allowed, batch_size))
        if eligible is not None:
            eligible.use(index)
        return torch.from_numpy(index), {}

    def _rows(self, length: int, allowed: np.ndarray | None, batch_size: int) -> np.ndarray:
        rows = np.arange(length) if allowed is None else np.flatnonzero(allowed)
        if self._drop_last and rows.size < batch_size:
            which = "" if allowed is None else f" that may be drawn, of {length}"
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not be larger than the content: got "
                f"batch_size={batch_size}, {rows.size} rows{which}."
            )
        return rows

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._journal.note(index)

    def mark_update(self, index: int | Tensor) -> None:
        super().mark_update(index)
        self._journal.note_replaced(index)  # a row that is replaced in place stays in the pass

    def empty(self) -> None:
        super().empty()
        self._journal.forget()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._journal.forget()
        self._loaded = True
