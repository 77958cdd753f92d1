"""Samplers of slices of trajectories: at random, each trajectory once per pass, and by priority.

Every batch of slices has the entry ``SLICE_END`` (``"slice_end"``, bool[N]): True on the last row of each slice, even
if its trajectory does not end there. The buffer adds it to the sample before the transforms run, so that they can tell
apart two slices of the same trajectory.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import SLICE_END, Sampler
from llmrl.data.replay_buffers.samplers.epochs import EpochSampler
from llmrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from llmrl.data.replay_buffers.samplers.slices import (
    Cut,
    Slices,
    accepted,
    every_slice,
    marks_like,
    propose_slices,
    slice_rows,
    slices_from,
)
from llmrl.data.replay_buffers.storages.base import Key, Storage
from llmrl.data.replay_buffers.trajectory_index import TrajectoryIndex
from llmrl.data.replay_buffers.utils import near_names

_MOST_DRAWS = 1 << 16

Span = bool | int | Sequence[bool | int]


class SliceSampler(Sampler):
    """Draws slices of trajectories with replacement; all slices are equally likely.

    A batch of N rows is ``num_slices`` slices of ``N / num_slices`` rows, or slices of ``slice_len`` rows: give exactly
    one of the two. The rows are flat, slice after slice; ``batch.view(num_slices, -1)`` is the usual next step.
    Trajectories end where ``traj_key`` (or ``trajectory_key``) changes, or where ``end_key`` is True; the default is
    the first existing entry of ``("collector", "traj_ids")``, ``"episode"`` and ``("next", "done")`` (an end key). For
    data that does not change, give ``trajectories`` (ids) or ``ends`` (bool), one per row, and ``cache_values=True``. A
    full ring continues from its end to its start and is cut at the position of the next write.

    ``strict_length`` skips trajectories shorter than a slice; without it they are returned whole. ``span`` is the
    number of rows by which slices may extend beyond their trajectory (True: all but one), or a pair for left and right;
    rows outside are left out. *Writes* ``"slice_end"``, True on the last row of every slice, and, into the sample of a
    ``TensorDictReplayBuffer`` (else the info), ``truncated_key`` and ``done``, also True there, and ``terminated``;
    ``truncated_key=None`` omits these three. ``compile`` and ``use_gpu`` have no effect.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
    >>> sampler = SliceSampler(slice_len=3, traj_key="episode")
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6)
    >>> data = TensorDict(step=torch.arange(7), episode=torch.tensor([0, 0, 0, 1, 1, 1, 1]), batch_size=[7])
    >>> _ = buffer.extend(data)
    >>> {tuple(piece) for _ in range(50) for piece in buffer.sample()["step"].view(2, 3).tolist()} == {
    ...     (0, 1, 2), (3, 4, 5), (4, 5, 6)}
    True
    """

    @near_names
    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: Span = False,
        use_gpu: bool | torch.device = False,
        trajectory_key: Key | None = None,
    ) -> None:
        who = type(self).__name__
        if trajectory_key is not None and traj_key is not None:
            raise TypeError(f"{who}: trajectory_key is another name of traj_key: got both.")
        if (ends is not None or trajectories is not None) and not cache_values:
            raise RuntimeError(
                f"{who}: trajectories and ends are for data that does not change: give cache_values=True too."
            )
        if (num_slices is None) == (slice_len is None):
            both = "both" if num_slices is not None else "neither"
            raise TypeError(f"{who}: exactly one of num_slices and slice_len is needed: got {both}.")
        if (num_slices or slice_len or 0) < 1:
            raise ValueError(f"{who}: num_slices and slice_len must be at least 1: got {num_slices or slice_len}.")
        sides = (span, span) if isinstance(span, bool | int) else tuple(span)
        if len(sides) != 2 or min(map(int, sides)) < 0:
            raise ValueError(f"{who}: span is a bool or a number of rows, or one for left and right: got {span}.")
        self.num_slices, self.slice_len, self.strict_length = num_slices, slice_len, strict_length
        self.span: tuple[bool | int, ...] = sides  # rows by which slices may extend beyond a trajectory, left and right
        self.traj_key = trajectory_key if traj_key is None else traj_key
        self.end_key, self.cache_values, self.truncated_key = end_key, cache_values, truncated_key
        self._index = TrajectoryIndex(
            who, traj_key=self.traj_key, end_key=end_key, trajectories=trajectories, ends=ends
        )
        self._flags: tuple[Storage, dict[str, Key], list[str]] | None = None
        self._all: tuple[Cut, Slices] | None = None
        self._last_plan: tuple[int, int, Cut] | None = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._length(storage)
        number, cut = self._plan(storage, batch_size)
        slices = propose_slices(self._index, cut, number, self.generator)
        if slices is None:  # too few rows end a slice: list all slices, and cache the list until the next write
            if self._all is None or self._all[0] != cut:
                self._all = (cut, every_slice(self._index, cut))
            last, lengths = self._all[1]
            if not last.size:
                raise self._no_slice(cut)
            pick = torch.randint(last.size, (number,), generator=self.generator).numpy()
            slices = last[pick], lengths[pick]
        return self._batch(storage, cut, *slices)

    def _plan(self, storage: Storage, batch_size: int) -> tuple[int, Cut]:
        """Updates the index; returns the number of slices of a batch, and how they are cut."""
        if self._last_plan is None or self._last_plan[0] != batch_size:
            parts = self.num_slices or self.slice_len
            if batch_size % parts or batch_size < 1:
                name = "slice_len" if self.num_slices is None else "num_slices"
                raise RuntimeError(
                    f"{type(self).__name__}: the batch size must be a multiple of {name}={parts}: got {batch_size}; "
                    f"take {max(batch_size // parts, 1) * parts}."
                )
            number = self.num_slices or batch_size // self.slice_len
            length = batch_size // number
            left, right = (length - 1 if side is True else min(int(side), length - 1) for side in self.span)
            self._last_plan = (batch_size, number, Cut(length, left, right, self.strict_length))
        if self._index.update(storage):
            self._all = None
        return self._last_plan[1:]

    def _no_slice(self, cut: Cut) -> RuntimeError:
        lasts = self._index.lasts()
        longest = int(self._index.rows_up_to(lasts).max()) if lasts.size else 0
        return RuntimeError(
            f"{type(self).__name__}: with strict_length a slice of {cut.length} rows needs a trajectory of as many: "
            f"the longest of {lasts.size} has {longest}; write more rows, take shorter slices or strict_length=False."
        )

    # --- batches ---

    def _batch(
        self, storage: Storage, cut: Cut, last: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, dict[Any, Any]]:
        """The positions of the slices' rows, int64[N], and the info that marks their ends."""
        positions, ends = slice_rows(self._index, cut, last, lengths)
        info: dict[Any, Any] = {SLICE_END: ends}
        if self.truncated_key is None:
            return positions, info
        if self._flags is None or self._flags[0] is not storage:
            key = self.truncated_key
            keys = {name: name if isinstance(key, str) else (*key[:-1], name) for name in ("done", "terminated")}
            keys["truncated"] = key
            self._flags = (storage, keys, [name for name in keys if storage.has_entry(keys[name])])
        _, keys, present = self._flags
        stored = {name: storage.entry(keys[name], positions) for name in present}
        flag = next(iter(stored.values())) if stored else ends.unsqueeze(1)
        mark = marks_like(flag, cut, ends)
        for name in ("truncated", "done"):  # True at slice ends
            info[keys[name]] = stored[name].logical_or(mark) if name in stored else mark.clone()
        # Always there, because done alone would turn the end of a slice into the end of an episode.
        info[keys["terminated"]] = stored["terminated"] if "terminated" in stored else torch.zeros_like(mark)
        return positions, info

    # --- notifications from the buffer ---

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._index.journal.note(index)

    def mark_update(self, index: int | Tensor, **storage: Storage | None) -> None:
        super().mark_update(index, **storage)
        self._index.journal.note_replaced(index)

    def empty(self) -> None:
        super().empty()
        self._index.forget()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._index.forget()

    def bookmark(self) -> Any:
        return self.generator.get_state()

    def go_back(self, bookmark: Any) -> None:
        self.generator.set_state(bookmark)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # raises for priorities that are pickled for another process
        return {**state, "_flags": None, "_all": None}  # caches of one storage are not copied


class SliceSamplerWithoutReplacement(EpochSampler, SliceSampler):
    """Draws every trajectory once per pass: one of its slices, uniformly.

    A pass contains the trajectories that existed when it began, in random order (``shuffle=False``: by stream and
    time). Rows written meanwhile join the next pass; trajectories that are overwritten, or become too short with
    ``strict_length``, leave the pass. The last batch of a pass holds the rest, or is dropped with ``drop_last``. The
    other arguments are those of ``SliceSampler``. State: the remaining trajectories, in order, and the generator.
    """

    def __init__(
        self, *, drop_last: bool = False, shuffle: bool = True, cache_values: bool = True, **arguments: Any
    ) -> None:
        super().__init__(drop_last, shuffle, cache_values=cache_values, **arguments)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._length(storage)
        number, cut = self._plan(storage, batch_size)
        index = self._index
        waiting = self._epoch.waiting()  # last cells of trajectories
        # Drops trajectories that are too short now: the ring may have overwritten rows since the pass began.
        self._epoch.drop(waiting[cut.count(index.rows_up_to(waiting)) == 0])
        last = self._take(number, lambda: self._lasts(number, cut))
        rows = index.rows_up_to(last)
        choices = cut.count(rows)
        # One random number per trajectory selects its slice; the minimum guards against rounding up to ``choices``.
        points = torch.rand(last.size, generator=self.generator, dtype=torch.float64).numpy()
        end, lengths = cut.piece(rows, np.minimum((points * choices).astype(np.int64), choices - 1))
        return self._batch(storage, cut, index.ahead(last, end - rows), lengths)

    def _lasts(self, number: int, cut: Cut) -> np.ndarray:
        lasts = self._index.lasts()
        lasts = lasts[cut.count(self._index.rows_up_to(lasts)) > 0]
        if not lasts.size:
            raise self._no_slice(cut)
        if self.drop_last and lasts.size < number:
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not have more slices than there are trajectories: "
                f"got {number} slices, {lasts.size} trajectories."
            )
        return lasts


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices by the priority of their first row, with replacement.

    A row at which no slice can begin, because its trajectory ends too soon, is skipped, whatever its priority; the
    others are drawn in proportion to ``(p + eps)^alpha``. With ``strict_length=False`` a trajectory shorter than a
    slice is returned whole and has the priority of its first row. Slices may end after their trajectory (``span``), but
    not begin before it. ``"priority_weight"`` is that of the first row, repeated along the slice. ``update_priority``
    takes rows, by the positions returned with the batch. The arguments are those of ``PrioritizedSampler`` and
    ``SliceSampler``.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        span: Span = False,
        **arguments: Any,
    ) -> None:
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, device
        )
        SliceSampler.__init__(self, span=span, **arguments)
        left, right = self.span
        if left:
            self.span = (False, right)
            warnings.warn(
                f"{type(self).__name__}: a slice begins at the row that was drawn, so it cannot begin before its "
                f"trajectory: the left side of span={span} has no effect.",
                stacklevel=2,
            )

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._catch_up(storage)
        number, cut = self._plan(storage, batch_size)
        starts = self._draw_starts(number, cut)
        lengths = self._index.rows_from(starts, cut.length)
        positions, info = self._batch(storage, cut, self._index.ahead(starts, lengths - 1), lengths)
        info["priority_weight"] = self._weights(starts).repeat_interleave(torch.from_numpy(lengths))
        return positions, info

    def _draw_starts(self, number: int, cut: Cut) -> np.ndarray:
        """Draws starts by priority: by rejection among all rows or, if too few are accepted, from a list of starts."""

        def propose(count: int) -> tuple[np.ndarray]:
            cells = self._draw(count)  # by mass; rejecting illegal starts does not change the others' proportions
            return (cells[slices_from(self._index, cut, cells)],)

        found = accepted(number, min(self._index.cells, _MOST_DRAWS), propose)
        if found is not None:
            return found[0]
        cells = np.arange(self._index.cells)
        cells = cells[slices_from(self._index, cut, cells)]
        if not cells.size:
            raise self._no_slice(cut)
        sums = self._tree.masses[cells].cumsum()
        if not sums[-1] > 0:
            raise RuntimeError(
                f"{self._who}: a row that a slice can begin at must have a priority above 0 (eps={self._eps}): got "
                f"only zeros for {cells.size} of them."
            )
        points = torch.rand(number, generator=self.generator, dtype=torch.float64).numpy()
        points = np.minimum(points * sums[-1], np.nextafter(sums[-1], 0))  # rounding must not pass the end
        return cells[sums.searchsorted(points, side="right")]
