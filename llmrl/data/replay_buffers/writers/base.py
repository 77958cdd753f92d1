"""What a writer is: it decides where in the storage the next rows go, and counts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from llmrl.data.replay_buffers.directory import StateFile
from llmrl.data.replay_buffers.storages import Storage


class Writer(StateFile, ABC):
    """Puts rows into the storage that it was registered with. The cursor and the counts are the storage's ring.

    ``compilable`` changes nothing: a buffer's ``add`` and ``extend`` run eagerly, also inside of compiled functions.
    """

    def __init__(self, compilable: bool = False) -> None:
        self._storage: Storage | None = None

    def register_storage(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            raise RuntimeError(f"{type(self).__name__}: a storage must be registered before the first write.")
        return self._storage

    @property
    def cursor(self) -> int:
        """Where the next row goes."""
        return self.storage.ring.cursor

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return self.storage.ring.write_count

    @abstractmethod
    def add(self, data: Any) -> int:
        """Writes one row and returns its position."""

    @abstractmethod
    def extend(self, data: Any) -> Tensor:
        """Writes a batch and returns the position of every row, int64[N]."""

    def as_stored(self, data: Any, index: int | Tensor) -> Any:
        """The rows as they are to be stored at these positions (int: one row). Raises if they must not be."""
        return data

    def empty(self, empty_write_count: bool = True) -> None:
        """Starts again at the first position."""
        self.storage.ring.cursor = 0
        if empty_write_count:
            self.storage.ring.write_count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "write_count": self.write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.storage.ring.cursor = state["cursor"]
        self.storage.ring.write_count = state["write_count"]
