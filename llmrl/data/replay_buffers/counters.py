"""The counters of a storage: how many rows there are, where the next one goes, and how much was ever written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WORDS = 5


def _word(place: int, doc: str) -> property:
    def get(counters: Counters) -> int:
        return counters._view[place]

    def put(counters: Counters, value: int) -> None:
        counters._view[place] = value

    return property(get, put, doc=doc)


class Counters:
    """One int64 tensor, so that it can lie in memory that several processes map. The storage's lock guards it.

    ``mutations`` never goes back: a reader that remembers it knows whether the rows are still those that it saw,
    also if another process has changed them.

    >>> counters = Counters()
    >>> counters.length, counters.cursor = 3, 3
    >>> counters
    Counters(length=3, cursor=3, write_count=0)
    """

    length = _word(0, "How many rows (cells, if the storage has several dimensions) there are.")
    cursor = _word(1, "Where the next row goes.")
    write_count = _word(2, "How many rows were ever written by a writer.")
    mutations = _word(3, "How often the content was changed: by a write, replacement, load or empty.")
    allocated = _word(4, "Not 0 once some process has allocated the columns of a shared storage.")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._path: Path | None = None
        self._map(torch.zeros(_WORDS, dtype=torch.int64))

    def _map(self, words: Tensor) -> None:
        self.words = words
        self._view = memoryview(words.numpy())  # an access by this costs a tenth of one by the tensor

    def changed(self) -> None:
        self._view[3] += 1

    # --- several processes ---

    @property
    def shared(self) -> bool:
        return self._path is not None

    def share(self, path: Path) -> None:
        """Moves the counters into the file ``path``, which pickled counters map too; before, they are copies."""
        path.write_bytes(bytes(self.words.numpy()))
        self._path = path
        self._map(_map_file(path))

    def check_writable(self, who: str) -> None:
        """Raises in a forked process, whose writes would stay in its private copy of the memory."""
        if self._path is None and os.getpid() != self._pid:
            raise RuntimeError(
                f"{who}: rows written by a forked process stay in its private copy of the memory: got a write in "
                f"process {os.getpid()} into a storage of process {self._pid}; call share() before the fork, or use "
                "LazyMemmapStorage."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "words": self.words.clone() if self._path is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pid = os.getpid()
        self._path = state["path"]
        self._map(state["words"] if self._path is None else _map_file(self._path))

    # --- state ---

    def state(self) -> dict[str, int]:
        return {"length": self.length, "cursor": self.cursor, "write_count": self.write_count}

    def load(self, state: dict[str, int]) -> None:
        self.length, self.cursor, self.write_count = state["length"], state["cursor"], state["write_count"]
        self.changed()

    def __repr__(self) -> str:
        return f"Counters(length={self.length}, cursor={self.cursor}, write_count={self.write_count})"


def _map_file(path: Path) -> Tensor:
    if not path.exists():
        raise RuntimeError(
            f"Counters: the counters of a shared buffer are a file of its owner: {path} does not exist (any more); the "
            "owner must live, on this machine, as long as others use the buffer."
        )
    return torch.from_file(str(path), shared=True, size=_WORDS, dtype=torch.int64)
