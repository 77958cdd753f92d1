"""A sum tree over an array of masses: batched updates, and batched draws in proportion to the masses.

Every level sums groups of sixteen of the level below; the top level has at most 4096 sums and is searched directly:
three levels for a million rows. Sums are always recomputed from the level below, so rounding errors do not accumulate;
minima are recomputed when the smallest mass is read.
"""

from __future__ import annotations

import numpy as np

_FANOUT = 16
_TOP = 4096


class SumTree:
    """``capacity`` float64 masses, initially 0. Rows of mass 0 are never drawn and are ignored by ``minimum``.

    >>> tree = SumTree(4)
    >>> tree.update(np.array([0, 1, 3]), np.array([1.0, 3.0, 4.0]))
    >>> tree.total, tree.minimum
    (8.0, 1.0)
    >>> tree.find(np.array([0.0, 0.9, 1.0, 3.9, 4.0, 7.9]))
    array([0, 0, 1, 1, 3, 3])
    """

    def __init__(self, capacity: int) -> None:
        sizes = [-(-capacity // _FANOUT) * _FANOUT]
        while sizes[-1] > _TOP:
            sizes.append(-(-sizes[-1] // _FANOUT**2) * _FANOUT)
        self._sums = [np.zeros(size) for size in sizes]
        self._minima = [np.full(size, np.inf) for size in sizes[1:]]
        self._outdated: list[np.ndarray] = []  # groups whose masses changed since the minima were computed
        self._num_outdated = 0
        self.capacity = capacity

    @property
    def masses(self) -> np.ndarray:
        """The masses, float64[capacity], not copied; change them only with ``update`` and ``rebuild``."""
        return self._sums[0][: self.capacity]

    @property
    def total(self) -> float:
        return float(self._sums[-1].sum())

    @property
    def minimum(self) -> float:
        """The smallest mass above 0; inf if there is none."""
        if self._outdated:
            index, self._outdated, self._num_outdated = np.concatenate(self._outdated), [], 0
            below = _positive(_groups(self._sums[0], index))
            for level, minima in enumerate(self._minima):
                minima[index] = np.minimum.reduce(below, 0)
                if level + 1 < len(self._minima):
                    index = index // _FANOUT
                    below = _groups(minima, index)
        return float((self._minima[-1] if self._minima else _positive(self._sums[0])).min())

    def update(self, index: np.ndarray, masses: np.ndarray | float) -> None:
        """Sets the masses at ``index``, int64[N]; for repeated positions the last value wins."""
        self._sums[0][index] = masses
        if not index.size or not self._minima:
            return
        first, last = int(index[0]), int(index[-1])
        run = last - first == index.size - 1 and bool((index[1:] - index[:-1] == 1).all())  # usual for written rows
        for level, sums in enumerate(self._sums[1:]):
            first, last = first // _FANOUT, last // _FANOUT
            # A run visits each parent once; scattered positions may repeat a parent, which is harmless.
            index = np.arange(first, last + 1) if run else index // _FANOUT
            sums[index] = np.add.reduce(_groups(self._sums[level], index), 0)
            if level == 0:
                self._outdated.append(index)
                self._num_outdated += index.size
        if self._num_outdated > self._sums[1].size:  # bounds the list if ``minimum`` is never read
            self._forget_minima()

    def rebuild(self, masses: np.ndarray) -> None:
        """Replaces all masses: the first ones with the given ones, the rest with 0."""
        self._sums[0][: masses.size] = masses
        self._sums[0][masses.size :] = 0
        for level, sums in enumerate(self._sums[1:]):
            np.add.reduce(_groups(self._sums[level], None), 0, out=sums[: self._sums[level].size // _FANOUT])
        self._forget_minima()

    def _forget_minima(self) -> None:
        self._outdated, self._num_outdated = [np.arange(self._sums[0].size // _FANOUT)], 0

    def find(self, points: np.ndarray) -> np.ndarray:
        """For each point, float64[N] in [0, total), the position whose interval of the cumulative sum contains it."""
        # The top level is searched directly ...
        top = self._sums[-1].cumsum()
        points = np.minimum(points, np.nextafter(top[-1], 0))
        index = top.searchsorted(points, side="right")
        points = points - (top[index] - self._sums[-1][index])
        numbers = np.arange(points.size)
        # ... and every lower level by the sixteen running sums of the group found above.
        for level in reversed(self._sums[:-1]):
            steps = _groups(level, index)
            for child in range(1, _FANOUT):
                np.add(steps[child - 1], steps[child], out=steps[child])
            # By rounding, the rest of a point may exceed the group: it must not select a mass of 0 after the last one.
            points = np.maximum(np.minimum(points, np.nextafter(steps[-1], 0)), 0)
            child = (steps <= points).sum(0)
            points = points - np.where(child > 0, steps[child - 1, numbers], 0)
            index = index * _FANOUT + child
        return index


def _groups(level: np.ndarray, index: np.ndarray | None) -> np.ndarray:
    """A copy of the groups at ``index``, float64[16, N]: numpy adds along dimension 0 fast and in a fixed order."""
    groups = level.reshape(-1, _FANOUT)
    return (groups if index is None else groups.take(index, 0)).T.copy()


def _positive(masses: np.ndarray) -> np.ndarray:
    return np.where(masses > 0, masses, np.inf)
