"""Draws without replacement: each row once per pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.epoch import EpochSampler
from llmrl.data.replay_buffers.samplers.uniform import FilteredSampler
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.write_journal import WriteJournal


class SamplerWithoutReplacement(EpochSampler, FilteredSampler):
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
        super().__init__(drop_last, shuffle, max_age=max_age, max_uses=max_uses, version_key=version_key)
        self._journal = WriteJournal()
        self._loaded = False  # the pass is of a loaded state: the rows are known to be those it was made for

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length, eligible = self._length(storage), self._eligible
        self._drop_overwritten(storage)
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
        """The rows of a new pass."""
        rows = np.arange(length) if allowed is None else np.flatnonzero(allowed)
        if self._drop_last and rows.size < batch_size:
            which = "" if allowed is None else f" that may be drawn, of {length}"
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not be larger than the content: got "
                f"batch_size={batch_size}, {rows.size} rows{which}."
            )
        return rows

    def _drop_overwritten(self, storage: Storage) -> None:
        """Rows that another process wrote; those of this one have left the pass already."""
        changes, loaded = self._journal.take(storage), self._loaded
        self._loaded = False
        if changes is not None:
            self._epoch.drop(changes[0])
        elif not loaded:
            self._end()

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
