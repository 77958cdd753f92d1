"""Uniform draws with replacement."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.eligibility import FilteredSampler
from llmrl.data.replay_buffers.storages import Storage


class RandomSampler(FilteredSampler):
    """Every row is as likely as any other at every draw. It has no passes: iterating over it does not end.

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
