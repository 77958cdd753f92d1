"""The sampler, which picks the positions of the next batch, and the default one: uniform draws with replacement.

`FilteredSampler` adds an age limit and a limit of uses to a sampler of single rows.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.directory import StateFile
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.write_journal import WriteJournal
from llmrl.errors import DataError


class Sampler(StateFile, ABC):
    """Picks rows of a storage. Draws from its own generator, which is part of its state.

    A generator that is not given is seeded from torch's global one at the first draw, so ``torch.manual_seed`` makes a
    run repeatable, and later draws depend on nothing else.

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
        """The positions of the next batch, int64[N], and info about them: tensors [N, ...] by key."""

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


class FilteredSampler(Sampler):
    """Leaves out rows of a policy more than ``max_age`` versions old, and rows that were drawn ``max_uses`` times.

    A row's age is the current version less its entry ``version_key``. The current version is what was last set, or
    else the newest of any row written so far. A row that is overwritten starts again with no uses; one that is replaced
    in place keeps them. None sets no limit.
    """

    def __init__(
        self,
        *,
        max_age: int | None = None,
        max_uses: int | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
    ) -> None:
        who = type(self).__name__
        if max_age is not None and max_age < 0:
            raise ValueError(f"{who}: max_age counts policy versions and must not be negative: got {max_age}.")
        if max_uses is not None and max_uses < 1:
            raise ValueError(f"{who}: max_uses must be at least 1: got {max_uses}.")
        self.max_age, self.max_uses, self.version_key = max_age, max_uses, version_key
        self._limited = max_age is not None or max_uses is not None
        self._journal = WriteJournal()
        self._version: int | None = None
        self._newest: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._journal.forget()
        self._uses = self._versions = np.zeros(0, dtype=np.int64)
        self._unread = False  # reading the versions failed: next time all of them are read
        self._loaded = False  # the state is a loaded one: its rows are those of the storage, though none was noted

    @property
    def version(self) -> int | None:
        """The current policy version, which ages are counted from: as set, or the newest of any row seen so far."""
        return self._newest if self._version is None else self._version

    @version.setter
    def version(self, version: int | None) -> None:
        if self.max_age is None:
            raise RuntimeError(f"{type(self).__name__}: a version is for a sampler with max_age: this one has none.")
        self._version = version

    # --- what the buffer says ---

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._journal.note(index)

    def mark_update(self, index: int | Tensor) -> None:
        super().mark_update(index)
        self._journal.note_replaced(index)

    def empty(self) -> None:
        super().empty()
        self._forget()

    # --- which rows may be drawn ---

    def _catch_up(self, storage: Storage) -> None:
        """Takes note of what was written since the last draw."""
        changes, loaded, self._loaded = self._journal.take(storage), self._loaded, False
        if changes is not None:
            self._overwritten(changes[0])
        elif not loaded:
            self._overwritten(None)
        if self._limited:
            self._note(storage, changes, loaded)

    def _overwritten(self, positions: np.ndarray | None) -> None:
        """There are other rows at these positions since the last draw; None: maybe at all of them."""

    def _note(self, storage: Storage, changes: tuple[np.ndarray, np.ndarray] | None, loaded: bool) -> None:
        length = len(storage)
        unread = np.arange(length)
        if changes is None:
            self._uses = _resized(self._uses[:length] if loaded else self._uses[:0], length)
            self._versions = _resized(self._versions[:0], length)
        else:
            written, replaced = changes
            if length > self._uses.size:  # doubled, so that a storage that grows row by row is not copied each time
                self._uses, self._versions = _resized(self._uses, 2 * length), _resized(self._versions, 2 * length)
            self._uses[written] = 0
            if not self._unread:
                unread = np.unique(np.concatenate([written, replaced]))
        self._unread = True  # if this fails, the journal does not tell of these rows again
        self._read_versions(storage, unread)
        self._unread = False

    def _read_versions(self, storage: Storage, positions: np.ndarray) -> None:
        if self.max_age is None or not positions.size:
            return
        versions = storage.entry(self.version_key, torch.from_numpy(positions))
        parts = versions if isinstance(versions, list) else [versions]  # a list: rows written one by one, or ragged
        for part in parts:
            if not isinstance(part, Tensor) or part.is_floating_point() or part.dtype is torch.bool:
                found = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise DataError(
                    f"{type(self).__name__}: max_age needs whole numbers in {self.version_key!r}: got {found}; "
                    "version_key names another entry."
                )
        if parts is versions:
            oldest = torch.stack([part.amin() for part in parts])
        else:
            oldest = versions.reshape(positions.size, -1).amin(1)  # of a row with several: its oldest part
        self._versions[positions] = oldest.cpu().numpy()
        newest = max(int(part.max()) for part in parts)
        self._newest = newest if self._newest is None else max(self._newest, newest)

    def _allowed(self, length: int) -> np.ndarray:
        """True for rows that may be drawn, bool[rows]. Raises: RuntimeError if there is none."""
        allowed, reasons = np.ones(length, dtype=bool), []
        if self.max_age is not None:
            old = self._versions[:length] < self.version - self.max_age
            allowed &= ~old
            reasons.append(f"{int(old.sum())} too old (max_age={self.max_age} at version {self.version})")
        if self.max_uses is not None:
            used = allowed & (self._uses[:length] >= self.max_uses)
            allowed &= ~used
            reasons.append(f"{int(used.sum())} used up (max_uses={self.max_uses})")
        if not allowed.any():
            raise RuntimeError(
                f"{type(self).__name__}: there must be a row that may be drawn: got none of {length}: "
                f"{', '.join(reasons)}; write new rows."
            )
        return allowed

    def _use(self, positions: np.ndarray) -> None:
        if self.max_uses is not None:
            np.add.at(self._uses, positions, 1)  # a position may come twice

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self._limited:
            return state
        uses = torch.from_numpy(self._uses.copy())
        return {**state, "eligible": {"uses": uses, "version": self._version, "newest": self._newest}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._forget()
        self._loaded = True
        if self._limited and "eligible" in state:
            eligible = state["eligible"]
            self._uses = eligible["uses"].numpy().copy()
            self._version, self._newest = eligible["version"], eligible["newest"]

    def bookmark(self) -> Any:
        return self.generator.get_state(), self._uses.copy()

    def go_back(self, bookmark: Any) -> None:
        generator, self._uses = bookmark
        self.generator.set_state(generator)


def _resized(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, dtype=values.dtype)
    out[: values.size] = values
    return out


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

    # Without limits, a draw needs to know nothing but the number of rows.

    def extend(self, index: int | Tensor) -> None:
        if self._limited:
            super().extend(index)

    def mark_update(self, index: int | Tensor) -> None:
        if self._limited:
            super().mark_update(index)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length = self._length(storage)
        if not self._limited:
            return torch.randint(length, (batch_size,), generator=self.generator), {}
        self._catch_up(storage)
        rows = np.flatnonzero(self._allowed(length))
        if self.max_uses is None:
            index = rows[torch.randint(rows.size, (batch_size,), generator=self.generator).numpy()]
        else:
            # Draws among all the uses that are left, without replacement; row i owns a run of them.
            uses = (self.max_uses - self._uses[rows]).cumsum()
            draws = torch.randperm(int(uses[-1]), generator=self.generator)[:batch_size].numpy()
            index = rows[np.searchsorted(uses, draws, side="right")]
            self._use(index)
        return torch.from_numpy(index), {}
