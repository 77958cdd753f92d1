"""The base class of samplers, which select the positions of the next batch, and the default: uniform with replacement.

`FilteredSampler` adds a limit on age and a limit on uses to samplers of single rows.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.utils import StateFile
from llmrl.data.replay_buffers.write_journal import WriteJournal
from llmrl.errors import DataError

SLICE_END = "slice_end"  # the entry of batches of slices: True on the last row of each


class PortableGenerator:
    """A random generator that is pickled as bytes.

    torch pickles it as a tensor in shared memory, which is gone before a spawned process maps it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __getstate__(self) -> tuple[torch.device, bytes]:
        return self.generator.device, self.generator.get_state().numpy().tobytes()

    def __setstate__(self, state: tuple[torch.device, bytes]) -> None:
        self.generator = torch.Generator(state[0])
        self.generator.set_state(torch.frombuffer(bytearray(state[1]), dtype=torch.uint8))


class Sampler(StateFile, ABC):
    """Selects rows of a storage with its own random generator, which is part of its state.

    If no generator is set, one is seeded from torch's global generator at the first draw, so ``torch.manual_seed``
    makes a run repeatable; later draws do not use the global generator.

    Positions are int64 and count cells, whatever the storage's ``ndim``. The buffer reports its writes through ``add``,
    ``extend``, ``mark_update`` and ``empty``.
    """

    _random: PortableGenerator | None = None

    @property
    def generator(self) -> torch.Generator:
        if self._random is None:
            seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
            self._random = PortableGenerator(torch.Generator().manual_seed(seed))
        return self._random.generator

    def set_rng(self, generator: torch.Generator | PortableGenerator) -> None:
        """Sets the generator; samplers that get the same `PortableGenerator` share it, also in a copy."""
        self._random = generator if isinstance(generator, PortableGenerator) else PortableGenerator(generator)

    @property
    def ran_out(self) -> bool:
        """True if the last batch ended a pass; always False for a sampler without passes."""
        return False

    @property
    def drop_last(self) -> bool:
        """True if every batch has exactly the requested size."""
        return False

    @property
    def default_priority(self) -> float:
        """The priority of a newly written row."""
        return 1.0

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the positions of the next batch, int64[N], and info about them: tensors [N, ...] by key."""

    def add(self, index: int | Tensor) -> None:
        """Called after a row was written at ``index``."""
        self.extend(index)

    def extend(self, index: int | Tensor) -> None:
        """Called after rows were written at ``index``, int64[N], or one position."""

    def mark_update(self, index: int | Tensor) -> None:
        """Called after the rows at ``index`` were changed in place."""

    def update_priority(self, index: int | Tensor, priority: float | Tensor) -> None:
        """Sets the priorities of the rows at ``index``; without effect in a sampler without priorities."""
        warnings.warn(f"{type(self).__name__} has no priorities: update_priority has no effect.", stacklevel=2)

    def check_priority(self, priority: Tensor) -> None:
        """Raises the errors of ``update_priority`` for the priorities [N, ...] of rows that are not yet written."""

    def empty(self) -> None:
        """Called after the storage was emptied."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def bookmark(self) -> Any:
        """The current point in the sequence of draws; cheaper than a state, but valid only until rows are written."""
        return self.state_dict()

    def go_back(self, bookmark: Any) -> None:
        """Rewinds to ``bookmark``: the draws made since are repeated."""
        self.load_state_dict(bookmark)

    def _length(self, storage: Storage) -> int:
        length = len(storage)
        if not length:
            raise RuntimeError(f"{type(self).__name__}: there must be a row to draw: got an empty storage.")
        return length


class FilteredSampler(Sampler):
    """Excludes rows more than ``max_age`` policy versions old, and rows that were drawn ``max_uses`` times.

    A row's age is the current version minus its entry ``version_key``. The current version is ``version`` if set,
    otherwise the newest version of any row written so far. Overwriting a row resets its uses; replacing it in place
    does not. None means no limit.
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
        self._unread = False  # True after reading versions failed: the next time all of them are read
        self._loaded = False  # True after loading a state: it matches the storage's rows although the journal is empty

    @property
    def version(self) -> int | None:
        """The current policy version, to which ages are relative: the one set, or the newest of any row so far."""
        return self._newest if self._version is None else self._version

    @version.setter
    def version(self, version: int | None) -> None:
        if self.max_age is None:
            raise RuntimeError(f"{type(self).__name__}: a version is for a sampler with max_age: this one has none.")
        self._version = version

    # --- notifications from the buffer ---

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._journal.note(index)

    def mark_update(self, index: int | Tensor) -> None:
        super().mark_update(index)
        self._journal.note_replaced(index)

    def empty(self) -> None:
        super().empty()
        self._forget()

    # --- eligible rows ---

    def _catch_up(self, storage: Storage) -> None:
        """Includes writes since the last draw."""
        changes, loaded, self._loaded = self._journal.take(storage), self._loaded, False
        if changes is not None:
            self._overwritten(changes[0])
        elif not loaded:
            self._overwritten(None)
        if self._limited:
            self._note(storage, changes, loaded)

    def _overwritten(self, positions: np.ndarray | None) -> None:
        """Called for positions overwritten since the last draw; None: possibly all of them."""

    def _note(self, storage: Storage, changes: tuple[np.ndarray, np.ndarray] | None, loaded: bool) -> None:
        length = len(storage)
        unread = np.arange(length)
        if changes is None:
            self._uses = _resized(self._uses[:length] if loaded else self._uses[:0], length)
            self._versions = _resized(self._versions[:0], length)
        else:
            written, replaced = changes
            if length > self._uses.size:  # doubled, so that growing row by row does not copy each time
                self._uses, self._versions = _resized(self._uses, 2 * length), _resized(self._versions, 2 * length)
            self._uses[written] = 0
            if not self._unread:
                unread = np.unique(np.concatenate([written, replaced]))
        self._unread = True  # if reading fails, the journal will not report these rows again
        self._read_versions(storage, unread)
        self._unread = False

    def _read_versions(self, storage: Storage, positions: np.ndarray) -> None:
        if self.max_age is None or not positions.size:
            return
        versions = storage.entry(self.version_key, torch.from_numpy(positions))
        parts = versions if isinstance(versions, list) else [versions]  # a list if rows differ in shape
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
            oldest = versions.reshape(positions.size, -1).amin(1)  # a row with several versions counts as its oldest
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
            np.add.at(self._uses, positions, 1)  # positions may repeat

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
    """Draws rows uniformly with replacement. It has no passes, so iteration does not end.

    ``max_age`` excludes rows whose ``version_key`` is more than that many policy versions behind ``sampler.version``
    (set by the trainer, otherwise the newest of any row so far). With ``max_uses`` a row is drawn at most that often
    until it is overwritten; draws are then uniform over the remaining uses, and a batch is smaller than requested if
    fewer remain. Raises: RuntimeError if no row may be drawn.

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

    # Without limits, a draw needs only the number of rows, so the journal is not kept.

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
            # Draws without replacement from the remaining uses of all rows; each row owns a contiguous range of them.
            uses = (self.max_uses - self._uses[rows]).cumsum()
            draws = torch.randperm(int(uses[-1]), generator=self.generator)[:batch_size].numpy()
            index = rows[np.searchsorted(uses, draws, side="right")]
            self._use(index)
        return torch.from_numpy(index), {}
