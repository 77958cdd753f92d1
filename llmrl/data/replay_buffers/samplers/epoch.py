"""One pass over rows: an order, a place in it, and the rows that have left it. Who makes the order is the sampler's
business."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_ABSENT, _WAITING, _DRAWN = 0, 1, 2


class Mark(NamedTuple):
    """Where a pass was."""

    epoch: Epoch
    place: int


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
        self._place = 0
        self._status: np.ndarray | None = None  # of each position; needed once some are dropped
        self.left = order.size

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` positions, or as many as are left."""
        if self._status is None:
            part = self._order[self._place : self._place + count].copy()  # whoever gets it may write to it
            self._place += part.size
            self.left -= part.size
            return part
        parts: list[np.ndarray] = []
        while count and self.left:
            part = self._order[self._place : self._place + count]
            self._place += part.size
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
            self._status[self._order[: self._place]] = _DRAWN
        known = positions[positions < self._status.size]
        waiting = np.unique(known[self._status[known] == _WAITING])
        self._status[waiting] = _ABSENT
        self.left -= waiting.size

    def waiting(self) -> np.ndarray:
        """What is still to be handed out, in order."""
        rest = self._order[self._place :]
        return rest if self._status is None else rest[self._status[rest] == _WAITING]

    def mark(self) -> Mark:
        return Mark(self, self._place)

    @staticmethod
    def back(mark: Mark) -> Epoch:
        """The pass as it was at ``mark``, if nothing was dropped since."""
        epoch = mark.epoch
        again = epoch._order[mark.place : epoch._place]
        if epoch._status is not None:
            again = again[epoch._status[again] == _DRAWN]
            epoch._status[again] = _WAITING
        epoch._place = mark.place
        epoch.left += again.size
        return epoch
