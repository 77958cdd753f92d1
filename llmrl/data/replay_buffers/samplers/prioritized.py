"""Sampling in proportion to priorities (prioritised experience replay)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.grid_index import flat_cells
from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.sum_tree import SumTree
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.utils import ProcessLocal, check_reduction, reduced
from llmrl.data.replay_buffers.write_journal import flat_positions
from llmrl.errors import CheckpointError, DataError

_FIRST_PRIORITY = 1.0
_WAITING_ROWS = 4096  # most written rows whose first priority may be deferred


class PrioritizedSampler(ProcessLocal, Sampler):
    """Draws row i, with replacement, with probability ``(p_i + eps)^alpha`` over the sum of that for all rows.

    ``sample`` also returns ``"priority_weight"``, the importance weight ``(mass_i / smallest mass)^-beta``, at most 1.
    A newly written row gets the largest priority ever set (initially 1), or with ``max_priority_within_buffer`` the
    largest of the rows still stored. ``alpha`` and ``beta`` may be set at any time.

    Sums are float64; ``dtype`` and ``device`` are those of the weights. ``reduction`` (max, min, median, mean, sum)
    reduces several priorities of a row to one. Priorities are local to the process that created the sampler: using it
    in a forked process, or passing it to a spawned one, raises RuntimeError.

    >>> from llmrl.data.replay_buffers import ListStorage, ReplayBuffer
    >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    >>> buffer = ReplayBuffer(storage=ListStorage(10), sampler=sampler, batch_size=2)
    >>> index = buffer.extend(["a", "b", "c"])
    >>> buffer.update_priority(index, torch.tensor([0.0, 1.0, 3.0]))
    >>> sampler.probabilities().round(decimals=3)
    tensor([0.0000, 0.2500, 0.7500], dtype=torch.float64)
    >>> buffer.update_priority(1, -0.5)
    Traceback (most recent call last):
    llmrl.errors.DataError: PrioritizedSampler: priorities must be finite and not negative: got -0.5 for position 1.
    """

    _kept = "priorities"

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if max_capacity < 1:
            raise ValueError(f"{self._who}: max_capacity counts rows and must be at least 1: got {max_capacity}.")
        if eps < 0:
            raise ValueError(f"{self._who}: eps must not be negative: got {eps}.")
        self._alpha, self._beta = self._exponent("alpha", alpha), self._exponent("beta", beta)
        self._eps = float(eps)
        self.max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = check_reduction(self._who, reduction)
        self.max_priority_within_buffer = max_priority_within_buffer
        self.device = None if device is None else torch.device(device)
        self._clear()

    def _clear(self) -> None:
        self._tree = SumTree(self.max_capacity)
        self._priorities = np.full(self.max_capacity, np.nan)  # NaN where a row is missing
        self._num_rows = 0
        self._largest: float | None = None  # None: must be recomputed
        self._written: list[np.ndarray] = []  # rows whose first priority is not yet set
        self._num_written = 0
        if not self.max_priority_within_buffer:
            self._largest = _FIRST_PRIORITY

    @property
    def _who(self) -> str:
        return type(self).__name__

    # --- settings ---

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._flush()
        alpha = self._exponent("alpha", alpha)
        masses = self._masses(np.nan_to_num(self._priorities), np.arange(self.max_capacity), alpha)
        self._alpha = alpha
        self._tree.rebuild(np.where(np.isnan(self._priorities), 0.0, masses))

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = self._exponent("beta", beta)

    @property
    def eps(self) -> float:
        return self._eps

    @property
    def default_priority(self) -> float:
        if self._largest is None:
            largest = np.fmax.reduce(self._priorities)  # NaN only if the buffer is empty
            self._largest = _FIRST_PRIORITY if np.isnan(largest) else float(largest)
        return self._largest

    def probabilities(self) -> Tensor:
        """The probability of each row at the next draw, float64[rows]."""
        self._flush()
        return torch.from_numpy(self._tree.masses[: self._num_rows] / self._tree.total)

    # --- draws ---

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        self._catch_up(storage)
        index = self._draw(batch_size)
        return torch.from_numpy(index), {"priority_weight": self._weights(index)}

    def _draw(self, count: int) -> np.ndarray:
        total = self._tree.total
        if not total > 0:
            raise RuntimeError(
                f"{self._who}: a row must have a priority above 0 (eps={self._eps}): got only zeros; with eps > 0 such "
                "rows can be drawn."
            )
        # float32 is too coarse to reach every row of a large buffer.
        points = torch.rand(count, generator=self.generator, dtype=torch.float64).numpy()
        return self._tree.find(points * total)

    def _weights(self, index: np.ndarray) -> Tensor:
        # Normalised by the largest weight of all rows, not of the batch, so that weights of batches are comparable.
        weights = (self._tree.masses[index] / self._tree.minimum) ** -self._beta
        return torch.from_numpy(weights).to(dtype=self.dtype, device=self.device)

    def _catch_up(self, storage: Storage) -> None:
        """Adds rows written before the sampler was attached, and drops rows that no longer exist."""
        self._check_process()
        length = self._length(storage)
        if length > self.max_capacity:
            raise ValueError(
                f"{self._who}: max_capacity must be at least the size of the storage: got {self.max_capacity}, "
                f"{length} rows of at most {storage.max_size}."
            )
        self._flush()
        if length > self._num_rows:
            self._set_default(np.arange(self._num_rows, length))
        elif length < self._num_rows:
            self._priorities[length:] = np.nan
            self._tree.update(np.arange(length, self._num_rows), 0.0)
            self._num_rows = length
            if self.max_priority_within_buffer:
                self._largest = None

    # --- notifications from the buffer ---

    def extend(self, index: int | Tensor) -> None:
        self._note(index)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Gives rows that were changed in place the default priority of new rows."""
        self._note(_flat(index, storage))

    def empty(self) -> None:
        self._clear()

    def update_priority(self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None) -> None:
        """Sets the priorities of the rows at ``index``, int64[N] (or [N, ndim], given the storage).

        ``priority`` is one number, or [N, ...]: dimensions after N are reduced. Positions of -1 are ignored; for
        repeated positions the last value wins. Raises, with nothing changed: RuntimeError for a wrong number of
        priorities, DataError for one that is negative or not finite, IndexError for a missing row.
        """
        self._check_process()
        where = np.asarray(_flat(index, storage), dtype=np.int64).reshape(-1)
        values = self._reduced(priority, where.size)
        if where.size and _highest(where) < 0:
            kept = where != -1
            where, values = where[kept], values[kept]
        if not where.size:
            return
        self._check_values(where, values)
        masses = self._masses(values, where, self._alpha)
        # All checks come before the first change.
        if not self._is_all_written(where):
            self._flush()
            if not 0 <= _highest(where) < self._num_rows:
                absent = (where < 0) | (where >= self._num_rows)
                raise IndexError(
                    f"{self._who}: a priority must be for an existing row: got position {where[absent][0]} of "
                    f"{self._num_rows} rows."
                )
        self._set(where, values, masses)

    def _is_all_written(self, where: np.ndarray) -> bool:
        """True if these are exactly the rows with a deferred first priority, which is then discarded."""
        if len(self._written) != 1 or self.max_priority_within_buffer or not np.array_equal(self._written[0], where):
            return False
        self._written, self._num_written = [], 0
        return True

    def check_priority(self, priority: Tensor) -> None:
        where = np.arange(len(priority))
        values = self._reduced(priority, where.size)
        self._check_values(where, values)
        self._masses(values, where, self._alpha)

    def _note(self, index: int | Tensor) -> None:
        self._check_process()
        where = flat_positions(index)
        where = where[where < self.max_capacity]  # the next sample raises for a storage that is too large
        self._written.append(where)
        self._num_written += where.size
        if self._num_written > _WAITING_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Sets the deferred priorities of written rows. The delay does not change them: only ``update_priority``
        changes the largest priority, and it flushes first."""
        if self._written:
            written, self._written, self._num_written = self._written, [], 0
            self._set_default(np.concatenate(written))

    def _set_default(self, where: np.ndarray) -> None:
        if self.max_priority_within_buffer and where.size:
            # If the largest priority is overwritten, it is recomputed when needed.
            if self._largest is not None and (self._priorities[where] == self._largest).any():
                self._largest = None
            self._priorities[where] = np.nan
        if where.size:
            values = np.full(where.size, self.default_priority)
            self._set(where, values, self._masses(values[:1], where, self._alpha))

    def _set(self, where: np.ndarray, values: np.ndarray, masses: np.ndarray) -> None:
        is_lost = self.max_priority_within_buffer and (self._priorities[where] == self._largest).any()
        self._priorities[where] = values
        if is_lost:
            self._largest = None
        elif self._largest is not None:
            if self.max_priority_within_buffer:
                values = self._priorities[where]  # for repeated positions only the last value is in the buffer
            self._largest = max(self._largest, float(np.maximum.reduce(values)))
        self._tree.update(where, masses)
        self._num_rows = max(self._num_rows, _highest(where) + 1)

    def _reduced(self, priority: float | Tensor, count: int) -> np.ndarray:
        values = torch.as_tensor(priority).detach().to("cpu", torch.float64)
        if values.numel() == 1 and count != 1:
            return np.full(count, values.item())
        if values.ndim == 0:
            values = values.reshape(1)
        if values.shape[0] != count or not values.numel():
            if not count and not values.numel():
                return np.empty(0)
            grid = " In the order of the positions, time is first: pass priority.movedim(time, 0).flatten(0, ndim - 1)."
            raise RuntimeError(
                f"{self._who}: one priority per position is needed, or one for all: got {list(values.shape)} for "
                f"{count} positions.{grid if values.numel() == count else ''}"
            )
        return (reduced(values, self.reduction) if values.ndim > 1 else values).numpy()

    def _check_values(self, where: np.ndarray, values: np.ndarray) -> None:
        if values.size and not 0 <= np.minimum.reduce(values) <= np.maximum.reduce(values) < np.inf:  # nor NaN
            wrong = ~(np.isfinite(values) & (values >= 0))
            raise DataError(
                f"{self._who}: priorities must be finite and not negative: got {values[wrong][0]} for position "
                f"{where[wrong][0]}."
            )

    def _masses(self, values: np.ndarray, where: np.ndarray, alpha: float) -> np.ndarray:
        with np.errstate(over="ignore"):
            masses = (values + self._eps) ** alpha
        if masses.size and not np.maximum.reduce(masses) < np.inf:
            wrong = ~np.isfinite(masses)
            raise DataError(
                f"{self._who}: (priority + eps)^alpha must be finite: got {values[wrong][0]}^{alpha} for position "
                f"{where[wrong][0]}."
            )
        return masses

    def _exponent(self, name: str, value: float) -> float:
        if not 0 <= value < float("inf"):
            raise ValueError(f"{self._who}: {name} must be finite and not negative: got {value}.")
        return float(value)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        rows = slice(0, self._num_rows)
        return {
            **super().state_dict(),
            "priorities": torch.from_numpy(self._priorities[rows].copy()),
            "masses": torch.from_numpy(self._tree.masses[rows].copy()),
            "largest": self._largest,
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        num_rows = state["priorities"].numel()
        if num_rows > self.max_capacity:
            raise CheckpointError(
                f"{self._who}: the state must fit: got {num_rows} priorities, expected at most max_capacity="
                f"{self.max_capacity}."
            )
        super().load_state_dict(state)
        self._clear()
        self._alpha, self._beta, self._eps = state["alpha"], state["beta"], state["eps"]
        self._priorities[:num_rows] = state["priorities"].numpy()
        self._tree.rebuild(state["masses"].numpy())
        self._num_rows, self._largest = num_rows, state["largest"]

    def bookmark(self) -> Any:
        return self.generator.get_state()

    def go_back(self, bookmark: Any) -> None:
        self.generator.set_state(bookmark)


def _highest(where: np.ndarray) -> int:
    """The largest position, or a negative one if there is any."""
    # As unsigned numbers, negative positions are the largest, so one pass checks both bounds.
    return int(np.maximum.reduce(where.view(np.uint64)).view(np.int64))


def _flat(index: int | Tensor, storage: Storage | None) -> int | Tensor:
    if isinstance(index, Tensor):
        index = index.detach().cpu()
        if storage is not None and storage.ndim > 1 and index.ndim == 2:
            return flat_cells(index, storage.trailing)
    return index
