"""Slices of trajectories: which there are, how they are drawn, and what a batch of them says about itself.

A slice is a run of rows of one trajectory, named by its last cell and its length. In a batch slices lie one after the
other, flat. Every batch of slices carries ``SLICE_END`` (``"slice_end"``, bool[N]): True on the last row of each slice,
whether its trajectory ends there or not. The buffer puts it into the sample before the transforms run, so that they can
tell two slices of one trajectory apart. Which slices come when is the business of the samplers in ``slices.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.trajectory_index import Key, TrajectoryIndex
from llmrl.errors import MissingKeyError

SLICE_END = "slice_end"
_MOST_PROPOSALS = 1 << 14

Span = bool | int | Sequence[bool | int]


class Cut(NamedTuple):
    """How slices are cut: ``length`` rows, of which ``left`` may lie before the trajectory and ``right`` behind it.

    What lies outside is left out, so such slices are shorter. ``strict``: trajectories shorter than ``length`` have no
    slices; else, and if none fits otherwise, they have one, which is the whole trajectory.
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
        """How many slices trajectories of so many rows have."""
        fitting = np.maximum(rows - self.length + 1 + self.left + self.right, 0)
        return np.where(rows >= self.length, fitting, 0) if self.strict else np.maximum(fitting, 1)

    def piece(self, rows: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the slice of that number of such a trajectory: the row that it ends before, and its length."""
        end = self.length - self.left + number  # as if the trajectory went on on both sides
        last = np.minimum(end, rows)
        whole = end > rows + self.right
        return last, np.where(whole, rows, last - np.maximum(end - self.length, 0))


class _Form:
    """What batches of so many slices of one length have in common."""

    def __init__(self, number: int, length: int) -> None:
        self.shape = (number, length)
        self.steps = np.arange(1 - length, 1)
        self.ends = torch.zeros(number, length, dtype=torch.bool)
        self.ends[:, -1] = True
        self.ends = self.ends.flatten()
        self._mark: Tensor | None = None

    def mark(self, flag: Tensor) -> Tensor:
        """The ends in the form of a flag; not to be handed out."""
        if self._mark is None or self._mark.shape != flag.shape or self._mark.device != flag.device:
            self._mark = _mark_like(flag, self.ends)
        return self._mark


def accepted(number: int, most: int, propose: Callable[[int], tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...] | None:
    """``number`` entries of what is proposed, as columns; None if they are rare: not there after ``most`` proposals.

    ``propose`` makes so many proposals, and returns those that are good.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    missing, proposals, proposed = number, 2 * number + 8, 0
    while missing:
        if proposed > most:
            return None
        parts.append(tuple([column[:missing] for column in propose(proposals)]))
        missing -= parts[-1][0].size
        proposed += proposals
        proposals *= 4
    return parts[0] if len(parts) == 1 else tuple([np.concatenate(column) for column in zip(*parts, strict=True)])


class Slicer:
    """What the samplers of slices share: how slices are cut from the trajectories, and the form of their batches."""

    def __init__(
        self,
        who: str,
        index: TrajectoryIndex,
        *,
        num_slices: int | None,
        slice_len: int | None,
        truncated_key: Key | None,
        strict_length: bool,
        span: Span,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            both = "both" if num_slices is not None else "neither"
            raise TypeError(f"{who}: exactly one of num_slices and slice_len is needed: got {both}.")
        if (num_slices or slice_len or 0) < 1:
            raise ValueError(f"{who}: num_slices and slice_len must be at least 1: got {num_slices or slice_len}.")
        self._who = who
        self.index = index
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.strict_length = strict_length
        self.truncated_key = truncated_key
        sides = (span, span) if isinstance(span, bool | int) else tuple(span)
        if len(sides) != 2 or min(map(int, sides)) < 0:
            raise ValueError(f"{who}: span is a bool or a number of rows, or one for left and right: got {span}.")
        self.span = sides
        self._signals: tuple[Storage, dict[str, Key], list[str]] | None = None
        self._all: tuple[Cut, np.ndarray, np.ndarray] | None = None
        self._plan: tuple[int, int, Cut] | None = None
        self._form: _Form | None = None

    def plan(self, storage: Storage, batch_size: int) -> tuple[int, Cut]:
        """Brings the index up to date; how many slices a batch has, and how they are cut."""
        if self._plan is None or self._plan[0] != batch_size:
            self._plan = (batch_size, *self._cut(batch_size))
        if self.index.update(storage):
            self._all = None
        return self._plan[1:]

    def _cut(self, batch_size: int) -> tuple[int, Cut]:
        parts = self.slice_len if self.num_slices is None else self.num_slices
        if batch_size % parts or batch_size < 1:
            name = "slice_len" if self.num_slices is None else "num_slices"
            raise RuntimeError(
                f"{self._who}: the batch size must be a multiple of {name}={parts}: got {batch_size}; take "
                f"{max(batch_size // parts, 1) * parts}."
            )
        number, length = batch_size // parts, parts
        if self.slice_len is None:
            number, length = length, number
        left, right = (length - 1 if side is True else min(int(side), length - 1) for side in self.span)
        return number, Cut(length, left, right, self.strict_length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_signals": None, "_all": None}  # what was learned from a storage stays behind

    # --- draws ---

    def draw(self, number: int, cut: Cut, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Slices, each as likely as any other: last cells and lengths, int64[number] each.

        Proposes ends anywhere and keeps those that are ends of slices, at a cost that does not depend on the number of
        rows. Where hardly any row is one, all slices are listed instead, once for as long as nothing is written.
        Raises: RuntimeError if there is no slice.
        """
        # A last row stands for the slices that reach behind it too: it is proposed so many times.
        copies = 1 + cut.right

        def propose(count: int) -> tuple[np.ndarray, np.ndarray]:
            cells = torch.randint(self.index.cells * copies, (count,), generator=generator).numpy()
            behind: np.ndarray | int = 0
            if copies > 1:
                cells, behind = cells // copies, cells % copies
            legal, lengths = self.slices_at(cells, behind, cut)
            return cells[legal], lengths[legal]

        found = accepted(number, min(self.index.cells, _MOST_PROPOSALS) * copies, propose)
        if found is None:
            cells, lengths = self.every(cut)
            if not cells.size:
                raise self.no_slice(cut)
            pick = torch.randint(cells.size, (number,), generator=generator).numpy()
            return cells[pick], lengths[pick]
        return found

    def slices_at(self, cells: np.ndarray, behind: np.ndarray | int, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
        """Whether a slice ends so many rows ``behind`` each cell (0: at it), as if its trajectory went on.

        Also its length.
        """
        index = self.index
        rows = index.rows_up_to(cells)
        lengths = np.minimum(rows, cut.length - behind)
        if cut.plain:
            return rows >= cut.length, lengths
        fits = rows + behind >= cut.length - cut.left
        last, at = index.is_last(cells), np.equal(behind, 0)
        fits &= last | at
        if not cut.strict:
            return fits | (last & at & (rows + cut.right < cut.length - cut.left)), lengths
        # Its trajectory has as many rows as a slice, here or further on.
        return fits & ((rows >= cut.length) | index.same(cells, np.maximum(cut.length - rows, 0))), lengths

    def every(self, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
        """All slices that there are."""
        if self._all is None or self._all[0] != cut:
            cells = np.arange(self.index.cells)
            parts = []
            for behind in range(1 + cut.right):
                legal, lengths = self.slices_at(cells, behind, cut)
                parts.append((cells[legal], lengths[legal]))
            self._all = (cut, np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        return self._all[1:]

    def no_slice(self, cut: Cut) -> RuntimeError:
        lasts = self.index.lasts()
        longest = int(self.index.rows_up_to(lasts).max()) if lasts.size else 0
        return RuntimeError(
            f"{self._who}: with strict_length a slice of {cut.length} rows needs a trajectory of as many: the longest "
            f"of {lasts.size} has {longest}; write more rows, take shorter slices or strict_length=False."
        )

    # --- batches ---

    def batch(self, storage: Storage, last: np.ndarray, lengths: np.ndarray, cut: Cut) -> tuple[Tensor, dict[Any, Any]]:
        """The positions of the slices' rows, int64[N], and the marks of their ends."""
        shape = last.size, cut.length
        if self._form is None or self._form.shape != shape:
            self._form = _Form(*shape)
        form = self._form
        cells = self.index.ahead(last[:, None], form.steps)
        if cut.plain:
            positions, ends = torch.from_numpy(cells.reshape(-1)), form.ends.clone()
        else:
            inside = torch.from_numpy(form.steps + lengths[:, None] > 0)
            positions, ends = torch.from_numpy(cells)[inside], form.ends.view(shape)[inside]
        info: dict[Any, Any] = {SLICE_END: ends}
        if self.truncated_key is not None:
            self._mark(storage, positions, info, form if cut.plain else None)
        return positions, info

    def _mark(self, storage: Storage, positions: Tensor, info: dict[Any, Any], form: _Form | None) -> None:
        """``truncated`` and ``done`` are True at the end of every slice; ``terminated`` is what is stored."""
        if self._signals is None or self._signals[0] is not storage:
            self._signals = self._stored_signals(storage, positions[:1])
        _, keys, present = self._signals
        stored = {name: storage.entry(keys[name], positions) for name in present}
        flag = next(iter(stored.values())) if stored else info[SLICE_END].unsqueeze(1)
        mark = _mark_like(flag, info[SLICE_END]) if form is None else form.mark(flag)
        for name in ("truncated", "done"):
            known = stored.get(name)
            info[keys[name]] = mark.clone() if known is None else known.logical_or(mark)
        if "terminated" in stored:
            info[keys["terminated"]] = stored["terminated"]

    def _stored_signals(self, storage: Storage, row: Tensor) -> tuple[Storage, dict[str, Key], list[str]]:
        """The keys of the flags, and which of them rows have."""
        key, present = self.truncated_key, []
        keys = {name: name if isinstance(key, str) else (*key[:-1], name) for name in ("done", "terminated")}
        keys["truncated"] = key
        for name, key in keys.items():
            try:
                storage.entry(key, row)
            except MissingKeyError:
                continue
            present.append(name)
        return storage, keys, present


def _mark_like(flag: Tensor, ends: Tensor) -> Tensor:
    """``ends``, bool[N], in the shape and on the device of ``flag``, [N, 1, ...]."""
    return ends.to(flag.device).view(-1, *[1] * (flag.ndim - 1)).expand(flag.shape)
