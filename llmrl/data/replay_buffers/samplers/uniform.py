"""Uniform draws with replacement, and the limits that it shares with draws without replacement."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.eligibility import Eligibility
from llmrl.data.replay_buffers.storages import Storage


class FilteredSampler(Sampler):
    """A sampler with the limits of ``Eligibility``; ``_eligible`` is None where none was asked for."""

    def __init__(self, max_age: int | None, max_uses: int | None, version_key: str | tuple[str, ...]) -> None:
        limited = max_age is not None or max_uses is not None
        self._eligible = Eligibility(type(self).__name__, max_age, max_uses, version_key) if limited else None

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

    def __init__(
        self,
        *,
        max_age: int | None = None,
        max_uses: int | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
    ) -> None:
        super().__init__(max_age, max_uses, version_key)

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
