"""Sampling without replacement in passes: each pass draws every position once, in a new order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import FilteredSampler, Sampler
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.write_journal import flat_positions

_ABSENT, _WAITING, _DRAWN = 0, 1, 2  # status of a position in an epoch


class Epoch:
    """Returns positions in a given order, each once, except those dropped before their turn.

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
        self._status: np.ndarray | None = None  # status of each position; created when the first is dropped
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
        """Removes positions from the pass; those already drawn, or not in the pass, are ignored."""
        if not self.left or not positions.size:
            return
        if self._status is None:  # created lazily: most passes drop no positions
            self._status = np.full(int(self._order.max()) + 1, _ABSENT, dtype=np.uint8)
            self._status[self._order] = _WAITING
            self._status[self._order[: self.place]] = _DRAWN
        known = positions[positions < self._status.size]
        waiting = np.unique(known[self._status[known] == _WAITING])
        self._status[waiting] = _ABSENT
        self.left -= waiting.size

    def waiting(self) -> np.ndarray:
        """The positions still to be drawn, in order."""
        rest = self._order[self.place :]
        return rest if self._status is None else rest[self._status[rest] == _WAITING]

    def go_back(self, place: int) -> Epoch:
        """Rewinds the epoch to ``place`` and returns it; valid only if nothing was dropped since."""
        again = self._order[place : self.place]
        if self._status is not None:
            again = again[self._status[again] == _DRAWN]
            self._status[again] = _WAITING
        self.place = place
        self.left += again.size
        return self


class EpochSampler(Sampler):
    """Draws from one `Epoch` after another; an overwritten position is dropped from the current one."""

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
        """The next positions of the pass; ``begin`` returns the positions of a new pass when this one is over."""
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

    A pass is one permutation of the rows that existed when it began. Rows written meanwhile join the next pass: new
    positions are not in the permutation, and a position overwritten before it was drawn leaves it. The last batch of a
    pass holds the rest, or is dropped with ``drop_last``. The state is the remaining positions in order, and the
    generator: a run resumed in the middle of a pass continues with the same batches.

    ``max_age`` is as in `RandomSampler` and also applies to rows that become too old during a pass. ``max_uses`` is the
    number of passes that may include a row before it is overwritten. Raises: RuntimeError if no row may be drawn.
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

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        length = self._length(storage)
        self._catch_up(storage)
        allowed = None
        if self._limited:
            allowed = self._allowed(length)
            self._epoch.drop(np.flatnonzero(~allowed))
        index = self._take(batch_size, lambda: self._rows(length, allowed, batch_size))
        self._use(index)
        return torch.from_numpy(index), {}

    def _overwritten(self, positions: np.ndarray | None) -> None:
        if positions is None:
            self._end()
        else:
            self._epoch.drop(positions)  # for other processes' writes; ``extend`` has dropped this process's already

    def _rows(self, length: int, allowed: np.ndarray | None, batch_size: int) -> np.ndarray:
        rows = np.arange(length) if allowed is None else np.flatnonzero(allowed)
        if self._drop_last and rows.size < batch_size:
            which = "" if allowed is None else f" that may be drawn, of {length}"
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not be larger than the content: got "
                f"batch_size={batch_size}, {rows.size} rows{which}."
            )
        return rows
