"""Passes over the rows: each row once per pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.eligibility import FilteredSampler
from llmrl.data.replay_buffers.samplers.epoch import Epoch
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.write_log import WriteLog, flat_positions


class SamplerWithoutReplacement(FilteredSampler):
    """Draws every row exactly once per pass, in random order (``shuffle=False``: in the order of positions).

    A pass is one permutation of the rows that were there when it began. Rows written meanwhile join the next pass: new
    positions are not in the permutation, and a position overwritten before it was drawn leaves it. The last batch of a
    pass holds what is left, or is dropped with ``drop_last``. State: what is left in order, and the generator: a run
    that is resumed in the middle of a pass goes on with the same batches.

    ``max_age`` leaves out rows whose ``version_key`` is more than that many policy versions behind ``sampler.version``
    (set by the trainer, or else the newest of any row so far), also those that get too old during a pass. ``max_uses``
    is the number of passes that a row is in before it is overwritten. Raises: RuntimeError if no row may be drawn.
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
        super().__init__(max_age, max_uses, version_key)
        self._drop_last = drop_last
        self.shuffle = shuffle
        self._log = WriteLog()
        self._epoch = Epoch(np.empty(0, dtype=np.int64))
        self._ran_out = False
        self._loaded = False  # the pass is of a loaded state: the rows are known to be those it was made for

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    @property
    def drop_last(self) -> bool:
        return self._drop_last

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length = self._length(storage)
        self._drop_overwritten(storage)
        allowed = None
        if self._eligible is not None:
            allowed = self._eligible.mask(storage)
            if not allowed.any():
                raise self._eligible.nothing_left(storage)
            self._epoch.drop(np.flatnonzero(~allowed))
        if self._too_short(batch_size):
            self._begin(length, allowed, batch_size)
        index = self._epoch.take(batch_size)
        if self._eligible is not None:
            self._eligible.use(index)
        self._ran_out = self._too_short(batch_size)
        return torch.from_numpy(index), {}

    def add(self, index: int | Tensor) -> None:
        self.extend(index)

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._log.note(index)
        if self._epoch.left:
            self._epoch.drop(flat_positions(index))
            self._ran_out = self._ran_out or not self._epoch.left

    def mark_update(self, index: int | Tensor) -> None:
        super().mark_update(index)
        self._log.note_replaced(index)  # a row that is replaced in place stays in the pass

    def empty(self) -> None:
        super().empty()
        self._log.forget()
        self._epoch = Epoch(np.empty(0, dtype=np.int64))
        self._ran_out = False

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
        self._log.forget()
        self._loaded = True
        self._epoch = Epoch(state["remaining"].numpy().copy())
        self._ran_out = state["ran_out"]
        self._drop_last = state["drop_last"]
        self.shuffle = state["shuffle"]

    def bookmark(self) -> Any:
        return super().bookmark(), self._epoch.mark(), self._ran_out

    def go_back(self, bookmark: Any) -> None:
        draws, mark, self._ran_out = bookmark
        super().go_back(draws)
        self._epoch = Epoch.back(mark)

    def _begin(self, length: int, allowed: np.ndarray | None, batch_size: int) -> None:
        rows = np.arange(length) if allowed is None else np.flatnonzero(allowed)
        if self._drop_last and rows.size < batch_size:
            which = "" if allowed is None else f" that may be drawn, of {length}"
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not be larger than the content: got "
                f"batch_size={batch_size}, {rows.size} rows{which}."
            )
        if self.shuffle:
            order = torch.randperm(rows.size, generator=self.generator).numpy()
            rows = order if allowed is None else rows[order]
        self._epoch = Epoch(rows)

    def _drop_overwritten(self, storage: Storage) -> None:
        """Rows that another process wrote; those of this one have left the pass already."""
        changes, loaded = self._log.take(storage), self._loaded
        self._loaded = False
        if changes is not None:
            self._epoch.drop(changes[0])
        elif not loaded:
            self._epoch = Epoch(np.empty(0, dtype=np.int64))

    def _too_short(self, batch_size: int) -> bool:
        return self._epoch.left < batch_size if self._drop_last else self._epoch.left == 0
