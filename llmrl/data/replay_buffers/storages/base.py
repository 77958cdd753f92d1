"""What a storage is: rows at integer positions. Where the next row goes is the writer's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def row_limit(who: str, max_size: int | None) -> int:
    """``max_size`` as a number; None is the largest int64."""
    if max_size is None:
        return torch.iinfo(torch.int64).max
    if max_size < 1:
        raise ValueError(f"{who}: max_size counts rows and must be at least 1: got {max_size}.")
    return max_size


class Storage(ABC):
    """Rows at positions ``0 .. len - 1``, at most ``max_size`` of them.

    Whatever goes in is copied and whatever comes out is a copy: nothing that a caller holds shares memory with a row.
    """

    max_size: int

    @abstractmethod
    def set(self, index: int | slice | Tensor, data: Any) -> None:
        """Writes one row (int) or a batch of rows (slice or int64[N]), growing by at most one gap-free run."""

    @abstractmethod
    def get(self, index: int | slice | Tensor) -> Any:
        """A copy of one row (int) or of a batch of rows (slice or int64[N])."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def empty(self) -> None:
        """Forgets all rows; what was allocated and the schema stay."""

    @abstractmethod
    def count(self, data: Any) -> int:
        """How many rows ``data`` holds when it is given to ``extend``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def contains(self, index: int | Tensor) -> bool | Tensor:
        """Whether there is a row at the position(s)."""
        if isinstance(index, Tensor):
            return (index >= -len(self)) & (index < len(self))
        return -len(self) <= index < len(self)

    def part(self, data: Any, start: int, end: int) -> Any:
        """The rows ``start .. end - 1`` of a batch."""
        return data[start:end]

    def dumps(self, path: str | Path) -> None:
        """Writes the state to the directory ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "state.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote. The file is a pickle: load only what you trust."""
        self.load_state_dict(torch.load(Path(path) / "state.pt", weights_only=False))

    def _check_run(self, where: list[int], num_rows: int) -> None:
        """Raises unless there is one position per row and writing them in this order leaves no gap."""
        if len(where) != num_rows:
            raise IndexError(
                f"{type(self).__name__}: one position per row is needed: got {len(where)} positions, {num_rows} rows."
            )
        length = len(self)
        for position in where:
            if position >= length:
                self._check_fits(position)
                if position > length:
                    raise RuntimeError(
                        f"{type(self).__name__}: rows are written without gaps: got position {position}, expected at "
                        f"most {length}."
                    )
                length += 1

    def _check_fits(self, last: int) -> None:
        if last >= self.max_size:
            raise IndexError(f"{type(self).__name__}: positions end at max_size={self.max_size}: got {last}.")


def positions(index: int | slice | Tensor | Sequence[int], length: int) -> list[int]:
    """An index as a list of non-negative positions."""
    if isinstance(index, slice):
        return list(range(*index.indices(length)))
    if isinstance(index, Tensor):
        return index.tolist()
    return [index] if isinstance(index, int) else list(index)
