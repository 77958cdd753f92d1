"""The ring: rows are written one after the other, and from the start again when the storage is full."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

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

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0
        self._write_count = 0

    @property
    def write_count(self) -> int:
        return self._write_count

    def add(self, data: Any) -> int:
        index = self.cursor
        self.storage.set(index, data)
        self.cursor = (index + 1) % self.storage.max_size
        self._write_count += 1
        return index

    def extend(self, data: Any) -> Tensor:
        storage = self.storage
        size, count = storage.max_size, storage.count(data)
        if not count:
            raise RuntimeError(f"{type(self).__name__}: a batch must have at least one row: got none.")
        start = self.cursor
        self._write(start, count, data)
        self.cursor = (start + count) % size
        self._write_count += count
        index = torch.arange(start, start + count)
        return index if start + count <= size else index % size

    def empty(self, empty_write_count: bool = True) -> None:
        self.cursor = 0
        if empty_write_count:
            self._write_count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "write_count": self._write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]
        self._write_count = state["write_count"]

    def _write(self, start: int, count: int, data: Any) -> None:
        storage = self.storage
        size = storage.max_size
        if start + count <= size:
            storage.set(slice(start, start + count), data)
            return
        if len(storage) < size:  # grow to the end first, so that the ring has no gap
            head = size - start
            storage.set(slice(start, size), storage.part(data, 0, head))
            start, count, data = 0, count - head, storage.part(data, head, count)
        if count > size:
            skip = count - size
            start, count, data = (start + skip) % size, size, storage.part(data, skip, count)
        storage.set(torch.arange(start, start + count) % size, data)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same for tensordicts, and writes each row's position into its entry ``"index"``."""

    def add(self, data: TensorDictBase) -> int:
        return super().add(_with_index(data, torch.tensor(self.cursor)))

    def extend(self, data: TensorDictBase) -> Tensor:
        count = self.storage.count(data)
        index = torch.arange(self.cursor, self.cursor + count) % self.storage.max_size
        return super().extend(_with_index(data, index))


def _with_index(data: TensorDictBase, index: Tensor) -> TensorDictBase:
    data = data.copy()  # the entries are shared, the caller's container is not touched
    data["index"] = index
    return data
