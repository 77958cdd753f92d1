"""Functions over a trajectory index that enumerate slices of trajectories, draw them, and return their rows.

A slice is a run of rows of one trajectory, given by its last cell and its length. ``behind`` is the number of rows
after that cell at which the slice would end if the trajectory continued: rows outside the trajectory are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.trajectory_index import TrajectoryIndex

_MOST_PROPOSALS = 1 << 14

Slices = tuple[np.ndarray, np.ndarray]  # last cells and lengths, int64[N] each


class Cut(NamedTuple):
    """Cuts slices of ``length`` rows; up to ``left`` of them may lie before the trajectory, and ``right`` after it.

    Rows outside the trajectory are left out, so such slices are shorter. With ``strict`` a trajectory shorter than
    ``length`` has no slices; without, if no slice fits, it has one, which is the whole trajectory.
    """

    length: int
    left: int
    right: int
    strict: bool

    @property
    def plain(self) -> bool:
        """True if every slice has ``length`` rows."""
        return self.strict and not self.left and not self.right

    def count(self, rows: np.ndarray) -> np.ndarray:
        """The number of slices of trajectories with this many rows."""
        # The number of offsets at which a window of this length exceeds neither end by too much.
        fitting = np.maximum(rows - self.length + 1 + self.left + self.right, 0)
        return np.where(rows >= self.length, fitting, 0) if self.strict else np.maximum(fitting, 1)

    def piece(self, rows: np.ndarray, number: np.ndarray) -> Slices:
        """The exclusive end row of slice ``number`` in a trajectory of ``rows`` rows, and the length of the slice."""
        end = self.length - self.left + number  # as if the trajectory continued on both sides
        last = np.minimum(end, rows)
        whole = end > rows + self.right  # no window fits: the slice is the whole short trajectory
        return last, np.where(whole, rows, last - np.maximum(end - self.length, 0))


def slices_at(
    index: TrajectoryIndex, cut: Cut, cells: np.ndarray, behind: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """True where a slice ends ``behind`` rows after each cell (0: at the cell), and the lengths of these slices."""
    rows = index.rows_up_to(cells)
    lengths = np.minimum(rows, cut.length - behind)
    if cut.plain:
        return rows >= cut.length, lengths
    fits = rows + behind >= cut.length - cut.left
    # Slices that end after their trajectory are attributed to its last row.
    last, at = index.is_last(cells), np.equal(behind, 0)
    fits &= last | at
    if not cut.strict:
        return fits | (last & at & (rows + cut.right < cut.length - cut.left)), lengths
    # With ``strict`` the trajectory, including rows after this cell, must have at least ``length`` rows.
    return fits & ((rows >= cut.length) | index.same(cells, np.maximum(cut.length - rows, 0))), lengths


def slices_from(index: TrajectoryIndex, cut: Cut, cells: np.ndarray) -> np.ndarray:
    """True where a slice begins at the cell; slices that begin before their trajectory are left out."""
    if cut.strict and not cut.right:
        return index.same(cells, cut.length - 1)
    before, after = index.rows_up_to(cells) - 1, index.rows_from(cells, cut.length)
    long = before + after >= cut.length
    fits = long & (after >= cut.length - cut.right)
    return fits if cut.strict else fits | (~long & ((before == 0) | (after >= cut.length - cut.right)))


def every_slice(index: TrajectoryIndex, cut: Cut) -> Slices:
    cells, parts = np.arange(index.cells), []
    for behind in range(1 + cut.right):
        legal, lengths = slices_at(index, cut, cells, behind)
        parts.append((cells[legal], lengths[legal]))
    return np.concatenate([cells for cells, _ in parts]), np.concatenate([lengths for _, lengths in parts])


def propose_slices(index: TrajectoryIndex, cut: Cut, number: int, generator: torch.Generator) -> Slices | None:
    """``number`` slices, drawn uniformly; None if too few rows end a slice.

    Rejection sampling: proposes random ends and keeps valid ones, at a cost independent of the number of rows.
    """
    copies = 1 + cut.right  # a trajectory's last row also stands for the slices that end after it: one copy for each

    def propose(count: int) -> Slices:
        # Every pair (cell, behind) is equally likely, so accepted slices are too.
        cells = torch.randint(index.cells * copies, (count,), generator=generator).numpy()
        behind: np.ndarray | int = 0
        if copies > 1:
            cells, behind = cells // copies, cells % copies
        legal, lengths = slices_at(index, cut, cells, behind)
        return cells[legal], lengths[legal]

    return accepted(number, min(index.cells, _MOST_PROPOSALS) * copies, propose)


def accepted(number: int, most: int, propose: Callable[[int], tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...] | None:
    """``number`` accepted proposals, as columns; None if ``most`` proposals did not yield enough.

    ``propose(count)`` makes ``count`` proposals and returns the accepted ones.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    missing, proposals, proposed = number, 2 * number + 8, 0
    while missing:
        if proposed > most:
            return None
        parts.append(tuple([column[:missing] for column in propose(proposals)]))
        missing -= parts[-1][0].size
        proposed += proposals
        proposals *= 4  # few were accepted: larger batches need fewer rounds
    return parts[0] if len(parts) == 1 else tuple([np.concatenate(column) for column in zip(*parts, strict=True)])


def slice_rows(index: TrajectoryIndex, cut: Cut, last: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """The positions of the slices' rows, int64[N], slice after slice; True on the last row of each, bool[N]."""
    steps, ends = _form(last.size, cut.length)
    cells = index.ahead(last[:, None], steps)
    if cut.plain:
        return torch.from_numpy(cells.reshape(-1)), ends.clone()
    inside = torch.from_numpy(steps + lengths[:, None] > 0)
    return torch.from_numpy(cells)[inside], ends.view(inside.shape)[inside]


def marks_like(flag: Tensor, cut: Cut, ends: Tensor) -> Tensor:
    """``ends``, bool[N], in the shape and on the device of ``flag``, [N, 1, ...]; read-only, as it may be cached."""
    if cut.plain:
        return _plain_marks(cut.length, flag.shape, flag.device)
    return ends.to(flag.device).view(-1, *[1] * (flag.ndim - 1)).expand(flag.shape)


# Cached by batch size, because building them costs as much as drawing the slices.


@lru_cache(maxsize=16)
def _form(number: int, length: int) -> tuple[np.ndarray, Tensor]:
    ends = torch.zeros(number, length, dtype=torch.bool)
    ends[:, -1] = True
    return np.arange(1 - length, 1), ends.flatten()


@lru_cache(maxsize=16)
def _plain_marks(length: int, shape: torch.Size, device: torch.device) -> Tensor:
    ends = _form(shape[0] // length, length)[1].to(device)
    return ends.view(-1, *[1] * (len(shape) - 1)).expand(shape)
