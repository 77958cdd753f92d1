"""Samplers of slices of trajectories: at random, each trajectory once per pass, and by priority.

What a slice is and how it lies in a batch: ``slicer.py``. Where trajectories begin and end: ``trajectory_index.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.arguments import near_names
from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.passes import Passes
from llmrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from llmrl.data.replay_buffers.samplers.slicer import Cut, Slicer, Span, accepted
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.trajectory_index import Key, TrajectoryIndex

_MOST_DRAWS = 1 << 16


class SliceSampler(Sampler):
    """Draws slices of trajectories with replacement; every slice that there is is as likely as any other.

    A batch of N rows is ``num_slices`` slices of ``N / num_slices`` rows, or slices of ``slice_len`` rows: give exactly
    one of the two. The rows come flat, slice after slice; ``batch.view(num_slices, -1)`` is the usual next step.

    Trajectories end where ``traj_key`` (or ``trajectory_key``) changes, or where ``end_key`` is True; the default is
    the first entry there is of ``("collector", "traj_ids")``, ``"episode"`` and ``("next", "done")`` (an end). For data
    that does not change, ``trajectories`` (ids) or ``ends`` (bool), one per row, say it instead, with
    ``cache_values=True``. A ring that is full goes on from its end to its start, and is cut where the next row goes.
    With ``ndim`` > 1 every stream has its own trajectories.

    ``strict_length``: trajectories shorter than a slice are passed over; else they come whole, and the batch is
    shorter. ``span`` lets slices begin before their trajectory and end behind it by up to so many rows (True: all but
    one), or a pair for left and right; what is outside is left out. With ``span=True`` every row of a trajectory is in
    as many slices as any other.

    *Writes* into the sample ``"slice_end"``, True on the last row of every slice; and, into that of a
    ``TensorDictReplayBuffer`` (of another buffer: into the info), ``truncated_key``, True there too, ``done`` beside it
    likewise, and ``terminated`` as stored. ``truncated_key=None`` leaves these three alone.

    ``cache_values``, ``compile`` and ``use_gpu`` change nothing: what is known of the trajectories is always kept, and
    brought up to date at the cost of the rows written since.

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
        self.traj_key = trajectory_key if traj_key is None else traj_key
        self.end_key, self.cache_values = end_key, cache_values
        self._slicer = Slicer(
            who,
            TrajectoryIndex(who, traj_key=self.traj_key, end_key=end_key, trajectories=trajectories, ends=ends),
            num_slices=num_slices,
            slice_len=slice_len,
            truncated_key=truncated_key,
            strict_length=strict_length,
            span=span,
        )

    @property
    def num_slices(self) -> int | None:
        return self._slicer.num_slices

    @property
    def slice_len(self) -> int | None:
        return self._slicer.slice_len

    @property
    def truncated_key(self) -> Key | None:
        return self._slicer.truncated_key

    @property
    def strict_length(self) -> bool:
        return self._slicer.strict_length

    @property
    def span(self) -> tuple[bool | int, bool | int]:
        """How far slices may reach over their trajectory on the left and on the right."""
        return self._slicer.span

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._length(storage)
        number, cut = self._slicer.plan(storage, batch_size)
        last, lengths = self._slicer.draw(number, cut, self.generator)
        return self._slicer.batch(storage, last, lengths, cut)

    def extend(self, index: int | Tensor) -> None:
        super().extend(index)
        self._slicer.index.log.note(index)

    def mark_update(self, index: int | Tensor, **storage: Storage | None) -> None:
        super().mark_update(index, **storage)
        self._slicer.index.log.note_replaced(index)

    def empty(self) -> None:
        super().empty()
        self._slicer.index.forget()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._slicer.index.forget()

    def bookmark(self) -> Any:
        return self.generator.get_state()

    def go_back(self, bookmark: Any) -> None:
        self.generator.set_state(bookmark)


class SliceSamplerWithoutReplacement(Passes, SliceSampler):
    """Draws every trajectory once per pass: one slice of it, any as likely as the others.

    A pass holds the trajectories that were there when it began, in random order (``shuffle=False``: by stream and
    time); rows written meanwhile join the next one, and trajectories that are overwritten, or with ``strict_length``
    get too short, leave it. The last batch of a pass holds what is left, or is dropped with ``drop_last``. The other
    arguments are those of ``SliceSampler``. State: the trajectories that are left, in order, and the generator.
    """

    def __init__(
        self, *, drop_last: bool = False, shuffle: bool = True, cache_values: bool = True, **arguments: Any
    ) -> None:
        super().__init__(drop_last, shuffle, cache_values=cache_values, **arguments)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._length(storage)
        slicer, index = self._slicer, self._slicer.index
        number, cut = slicer.plan(storage, batch_size)
        waiting = self._epoch.waiting()  # last cells of trajectories
        self._epoch.drop(waiting[cut.count(index.rows_up_to(waiting)) == 0])
        last = self._take(number, lambda: self._lasts(number, cut))
        rows = index.rows_up_to(last)
        choices = cut.count(rows)
        points = torch.rand(last.size, generator=self.generator, dtype=torch.float64).numpy()
        end, lengths = cut.piece(rows, np.minimum((points * choices).astype(np.int64), choices - 1))
        return slicer.batch(storage, index.ahead(last, end - rows), lengths, cut)

    def _lasts(self, number: int, cut: Cut) -> np.ndarray:
        """The last cells of the trajectories of a new pass."""
        lasts = self._slicer.index.lasts()
        lasts = lasts[cut.count(self._slicer.index.rows_up_to(lasts)) > 0]
        if not lasts.size:
            raise self._slicer.no_slice(cut)
        if self._drop_last and lasts.size < number:
            raise ValueError(
                f"{type(self).__name__}: with drop_last a batch must not have more slices than there are trajectories: "
                f"got {number} slices, {lasts.size} trajectories."
            )
        return lasts


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices by the priority of their first row, with replacement.

    A row that no slice can begin at, because its trajectory ends too soon, is passed over, whatever its priority: the
    others are drawn in proportion to ``(p + eps)^alpha``. With ``strict_length=False`` a trajectory shorter than a
    slice comes whole and has the priority of its first row. Slices may end behind their trajectory (``span``), but not
    begin before it. ``"priority_weight"`` is that of the first row, repeated along the slice. ``update_priority`` takes
    rows, by the positions that came with the batch. The arguments are those of ``PrioritizedSampler`` and
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
        left, right = self._slicer.span
        if left:
            self._slicer.span = (False, right)
            warnings.warn(
                f"{type(self).__name__}: a slice begins at the row that was drawn, so it cannot begin before its "
                f"trajectory: the left side of span={span} has no effect.",
                stacklevel=2,
            )

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._catch_up(storage)
        slicer, index = self._slicer, self._slicer.index
        number, cut = slicer.plan(storage, batch_size)
        starts = self._draw_starts(number, cut)
        lengths = index.rows_from(starts, cut.length)
        positions, info = slicer.batch(storage, index.ahead(starts, lengths - 1), lengths, cut)
        info["priority_weight"] = self._weights(starts).repeat_interleave(torch.from_numpy(lengths))
        return positions, info

    def _draw_starts(self, number: int, cut: Cut) -> np.ndarray:
        """Starts by priority: proposed among all rows, or, where hardly any can be one, listed."""

        def propose(count: int) -> tuple[np.ndarray]:
            cells = self._draw(count)
            return (cells[self._can_begin(cells, cut)],)

        found = accepted(number, min(self._slicer.index.cells, _MOST_DRAWS), propose)
        if found is not None:
            return found[0]
        cells = np.arange(self._slicer.index.cells)
        cells = cells[self._can_begin(cells, cut)]
        if not cells.size:
            raise self._slicer.no_slice(cut)
        sums = self._tree.masses[cells].cumsum()
        if not sums[-1] > 0:
            raise RuntimeError(
                f"{self._who}: a row that a slice can begin at must have a priority above 0 (eps={self._eps}): got "
                f"only zeros for {cells.size} of them."
            )
        points = torch.rand(number, generator=self.generator, dtype=torch.float64).numpy()
        points = np.minimum(points * sums[-1], np.nextafter(sums[-1], 0))
        return cells[sums.searchsorted(points, side="right")]

    def _can_begin(self, cells: np.ndarray, cut: Cut) -> np.ndarray:
        index = self._slicer.index
        if not cut.right and cut.strict:
            return index.same(cells, cut.length - 1)
        before = index.rows_up_to(cells) - 1
        after = index.rows_from(cells, cut.length)
        long = before + after >= cut.length
        fits = long & (after >= cut.length - cut.right)
        return fits if cut.strict else fits | (~long & ((before == 0) | (after >= cut.length - cut.right)))
