"""The sampler: it picks the positions of the next batch, from its own generator."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from llmrl.data.replay_buffers.directory import StateFile
from llmrl.data.replay_buffers.storages import Storage


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
        """A row was written at ``index``; by default that is ``extend``, for a position."""
        self.extend(index)

    def extend(self, index: int | Tensor) -> None:
        """Rows were written at ``index``, int64[N] (from ``add``, one position)."""

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
