"""What samplers that draw without replacement share: the pass that they are in, its end and its state.

Which rows a pass has, and what else makes one leave it, is the business of the samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.epoch import Epoch
from llmrl.data.replay_buffers.write_journal import flat_positions


class Passes(Sampler):
    """Goes through an `Epoch`, then through the next one. A position that is written anew leaves the one it is in."""

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
        return self._epoch.left < count if self._drop_last else self._epoch.left == 0

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
        return super().bookmark(), self._epoch.mark(), self._ran_out

    def go_back(self, bookmark: Any) -> None:
        draws, mark, self._ran_out = bookmark
        super().go_back(draws)
        self._epoch = Epoch.back(mark)
