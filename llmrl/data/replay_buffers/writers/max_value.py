"""A writer that keeps the top-k rows by rank."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.storages.base import read_entry
from llmrl.data.replay_buffers.utils import ProcessLocal, check_reduction, reduced
from llmrl.data.replay_buffers.writers.base import Writer, with_index
from llmrl.errors import DataError


class TensorDictMaxValueWriter(ProcessLocal, Writer):
    """Keeps the ``max_size`` tensordicts with the highest rank: their entry ``rank_key``, one number by ``reduction``.

    Once the storage is full, a row replaces the lowest-ranked one if its rank is higher; among rows of equal rank the
    oldest are kept. *Writes* each row's position into its entry ``"index"``. *Returns* the position of every row after
    the call; for rows that were not kept, -1 in a batch and None for a single row.

    Raises: MissingKeyError without ``rank_key``, DataError for a rank that is NaN, RuntimeError for rows that are not
    tensordicts, ValueError for a storage with several dimensions; nothing is written in these cases. The ranks are
    local to one process.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
    >>> writer = TensorDictMaxValueWriter(rank_key="score")
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=writer)
    >>> buffer.extend(TensorDict(score=torch.tensor([3.0, 1.0, 2.0, 0.0]), batch_size=[4]))
    tensor([ 0, -1,  1, -1])
    >>> buffer[:]["score"]
    tensor([3., 2.])
    """

    _kept = "ranks"

    def __init__(
        self,
        rank_key: str | tuple[str, ...] = ("next", "reward"),
        reduction: str = "sum",
        *,
        compilable: bool = False,
    ) -> None:
        super().__init__()
        self.rank_key = rank_key
        self.reduction = check_reduction(type(self).__name__, reduction)
        # A heap of (rank, -number of the write, position): the first is the next one to be replaced.
        self._heap: list[tuple[float, int, int]] = []
        self._written = 0
        self._seen: int | None = None  # ``Counters.mutations`` of the storage when the heap was last in sync

    def register_storage(self, storage: Storage) -> None:
        if storage.ndim > 1:
            raise ValueError(
                f"{type(self).__name__}: ranked rows do not lie on a grid: got a storage with ndim={storage.ndim}."
            )
        super().register_storage(storage)

    def add(self, data: TensorDictBase) -> int | None:
        index = int(self._write(self._ranks(data, 1), data, single=True))
        return None if index < 0 else index

    def extend(self, data: TensorDictBase) -> Tensor:
        count = data.batch_size[0] if isinstance(data, TensorDictBase) and data.batch_dims else 0
        ranks = self._ranks(data, count)
        if not count:
            raise RuntimeError(f"{type(self).__name__}: a batch must have at least one row: got none.")
        return self._write(ranks, data, single=False)

    def as_stored(self, data: Any, index: int | Tensor) -> Any:
        self._ranks(data, 1 if isinstance(index, int) else len(index))
        return with_index(data, index, self.storage)

    def _write(self, ranks: list[float], data: TensorDictBase, *, single: bool) -> Tensor:
        self._check_process()
        storage = self.storage
        self._know_ranks()
        # Works on copies and assigns them after the storage has accepted the rows, so that an error changes nothing.
        heap, written, size = list(self._heap), self._written, storage.max_size
        index, holder = [-1] * len(ranks), {}
        for row, rank in enumerate(ranks):
            if len(heap) < size:
                position = len(heap)
                heapq.heappush(heap, (rank, -written, position))  # among equal ranks the newest is replaced first
            elif rank > heap[0][0]:
                position = heap[0][2]
                heapq.heapreplace(heap, (rank, -written, position))
            else:
                continue
            written += 1
            if position in holder:  # this row replaces an earlier row of the same batch
                index[holder[position]] = -1
            index[row], holder[position] = position, row
        if holder:
            positions = torch.tensor(sorted(holder))
            rows = data if single else data[torch.tensor([holder[position] for position in positions.tolist()])]
            where = int(positions) if single else positions
            storage.set(where, with_index(rows, where, storage))
            self._seen = storage.counters.mutations
            storage.counters.cursor = len(storage) % size
            storage.counters.write_count += len(holder)
        self._heap, self._written = heap, written
        return torch.tensor(index)

    def _ranks(self, data: Any, count: int) -> list[float]:
        if not isinstance(data, TensorDictBase):
            raise RuntimeError(
                f"{type(self).__name__}: rows must be tensordicts, to have a rank: got {type(data).__name__}."
            )
        return self._reduced(read_entry(type(self).__name__, data, self.rank_key), count)

    def _reduced(self, ranks: Tensor, count: int) -> list[float]:
        if not count:
            return []
        ranks = reduced(ranks.detach().to("cpu", torch.float64).reshape(count, -1), self.reduction)
        if ranks.isnan().any():
            row = int(ranks.isnan().nonzero()[0])
            raise DataError(
                f"{type(self).__name__}: a rank must be a number: got NaN in {self.rank_key!r} of row {row}; leave out "
                "rows whose reward failed."
            )
        return ranks.tolist()

    def _know_ranks(self) -> None:
        """Rebuilds the heap if rows existed before this writer or were changed by other code since."""
        storage = self.storage
        if storage.counters.mutations == self._seen:
            return
        length = len(storage)
        ranks = self._reduced(storage.entry(self.rank_key, torch.arange(length)), length) if length else []
        # Rows of equal rank keep their order: by the number of their write, or where it is not known, by position.
        numbers = {position: number for _, number, position in self._heap}
        self._heap = [(rank, numbers.get(position, -position), position) for position, rank in enumerate(ranks)]
        heapq.heapify(self._heap)
        self._written, self._seen = max(self._written, length), storage.counters.mutations

    def empty(self, empty_write_count: bool = True) -> None:
        super().empty(empty_write_count)
        self._heap, self._written = [], 0

    def state_dict(self) -> dict[str, Any]:
        ranks, numbers, positions = zip(*self._heap, strict=True) if self._heap else ((), (), ())
        return {
            **super().state_dict(),
            "ranks": torch.tensor(ranks, dtype=torch.float64),
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "written": self._written,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        columns = (state[name].tolist() for name in ("ranks", "numbers", "positions"))
        self._heap = list(zip(*columns, strict=True))
        self._written, self._seen = state["written"], None
