"""The ring: rows are written one after the other, and from the start again when the storage is full."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.replay_buffers.cells import coordinates
from llmrl.data.replay_buffers.storages.base import refuse_compilable
from llmrl.data.replay_buffers.writers.base import Writer


class RoundRobinWriter(Writer):
    """Writes at a cursor that wraps at the size of the storage: the newest ``max_size`` rows stay.

    In a batch longer than the storage the later rows win, and positions repeat.

    >>> from llmrl.data.replay_buffers import ListStorage
    >>> writer, storage = RoundRobinWriter(), ListStorage(5)
    >>> writer.register_storage(storage)
    >>> writer.extend(list(range(12))).tolist()
    [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    >>> storage.get(slice(0, 5)), writer.cursor
    ([10, 11, 7, 8, 9], 2)
    """

    def __init__(self, compilable: bool = False) -> None:
        refuse_compilable(type(self).__name__, compilable)
        super().__init__()

    def add(self, data: Any) -> int:
        storage = self.storage
        ring, index = storage.ring, storage.ring.cursor
        storage.set(index, data)
        ring.cursor = (index + 1) % storage.max_size
        ring.write_count += 1
        return index

    def extend(self, data: Any) -> Tensor:
        storage = self.storage
        ring, size, count = storage.ring, storage.max_size, storage.count(data)
        if not count:
            raise RuntimeError(f"{type(self).__name__}: a batch must have at least one row: got none.")
        start = ring.cursor
        end = start + count
        if end <= size:
            storage.set(slice(start, end), data)
        else:
            self._wrap(start, count, data)
        ring.cursor = end % size
        ring.write_count += count
        index = torch.arange(start, end)
        return index if end <= size else index % size

    def _wrap(self, start: int, count: int, data: Any) -> None:
        storage = self.storage
        size = storage.max_size
        skip = max(0, count - size)  # rows that later ones of the same batch would replace
        start = (start + skip) % size
        head = size - start
        runs = [
            (slice(start, size), storage.part(data, skip, skip + head)),
            (slice(0, count - skip - head), storage.part(data, skip + head, count)),
        ]
        if skip:  # a storage that is not full has no gap if it is filled from its beginning
            runs.reverse()
        for run, rows in runs:
            if run.stop > run.start:
                storage.set(run, rows)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same for tensordicts, and writes each row's position into its entry ``"index"``."""

    def add(self, data: TensorDictBase) -> int:
        cursor = self.storage.ring.cursor
        return super().add(with_index(data, coordinates(torch.tensor(cursor), self.storage.trailing)))

    def extend(self, data: TensorDictBase) -> Tensor:
        storage = self.storage
        cursor = storage.ring.cursor
        index = torch.arange(cursor, cursor + storage.count(data))
        if cursor + len(index) > storage.max_size:
            index %= storage.max_size
        return super().extend(with_index(data, coordinates(index, storage.trailing)))


def with_index(data: TensorDictBase, index: Tensor) -> TensorDictBase:
    """The rows with an entry ``"index"``: a position (or coordinates) per row, expanded to what a row has inside."""
    rows = index.ndim if index.ndim < 2 else 1
    inside = data.batch_size[rows:]
    if inside:
        index = index.view(*index.shape[:rows], *[1] * len(inside), *index.shape[rows:])
        index = index.expand(*index.shape[:rows], *inside, *index.shape[rows + len(inside) :])
    data = data.copy()  # the entries are shared, the caller's container is not touched
    data["index"] = index
    return data
