"""The endless (or counted) stream of prompts that `DataLoadingPrimer` pulls from, addressed by one integer.

Position ``p`` of the stream is prompt ``p % N`` of epoch ``p // N``, in that epoch's order. A source answers "the rows
at these positions"; nothing else is state. So a saved position restores the stream exactly, and rank r of w reads
positions r, r + w, r + 2w, ...: together the ranks read what one process would, batch by batch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.errors import DataError
from llmrl.modules.llm.engines.sampling import GOLDEN, mix64

__all__ = ["IndexedRows", "IteratedRows", "RowSource", "row_seeds", "row_source"]

Row = Mapping[str, Any]


class RowSource(Protocol):
    """A source of rows, addressed by position."""

    epoch_size: int | None  # None until the end of the first epoch has been seen

    def rows(self, positions: Sequence[int]) -> list[Row]:
        """The rows at increasing positions of the stream; shorter than asked only where the stream has ended."""

    def number(self, position: int) -> int:
        """The number of the row, from 1, at a position that was read: for messages."""

    def close(self) -> None:
        """Closes what reading has opened; another read opens it again."""


class IndexedRows:
    """Rows of something with a length and an index, in an order that depends on (seed, epoch) alone.

    Raises  DataError for an empty dataset

    >>> stream = IndexedRows(["a", "b", "c"], shuffle=True, seed=0)
    >>> sorted(stream.rows([0, 1, 2])) == sorted(stream.rows([3, 4, 5])) == ["a", "b", "c"]
    True
    """

    def __init__(self, dataset: Sequence[Row], *, shuffle: bool, seed: int):
        if len(dataset) == 0:
            raise DataError("DataLoadingPrimer: a dataset must have at least one row: got an empty one.")
        self.dataset = dataset
        self.epoch_size: int | None = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # the last epoch's permutation

    def rows(self, positions: Sequence[int]) -> list[Row]:
        indices = [self._index(position) for position in positions]
        if hasattr(self.dataset, "column_names"):  # datasets.Dataset: one read for all rows, as columns
            columns = self.dataset[indices]
            return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self.dataset[index] for index in indices]

    def number(self, position: int) -> int:
        return self._index(position) + 1

    def close(self) -> None:
        """Nothing is open between reads."""

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.dataset))
        if not self.shuffle:
            return offset
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(int(row_seeds(self.seed, [epoch])[0]))
            self._order = (epoch, torch.randperm(len(self.dataset), generator=generator).tolist())
        return self._order[1][offset]


class IteratedRows:
    """Rows of an iterable (a DataLoader, a generator function's object with ``__iter__``), started again at every
    epoch.

    A position that was passed is not read again: going back (to resume) starts the iterable from its beginning and
    skips. The order is the iterable's own; a shuffling DataLoader resumes exactly only if its generator is seeded
    alike.
    Raises  DataError where an epoch yields nothing
    """

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self.epoch_size: int | None = None
        batch_size = getattr(loader, "batch_size", None)
        self._batched = bool(batch_size)
        self._iterator: Generator[Row] | None = None
        self._next = 0

    def rows(self, positions: Sequence[int]) -> list[Row]:
        found: list[Row] = []
        for position in positions:
            if self._iterator is None or position < self._next:
                self._iterator, self._next = self._stream(), 0
            row: Row | None = None
            while self._next <= position:
                row = next(self._iterator)
                self._next += 1
            found.append(row)  # type: ignore[arg-type]
        return found

    def number(self, position: int) -> int:
        return (position if self.epoch_size is None else position % self.epoch_size) + 1

    def close(self) -> None:
        """Ends the epoch that is being read, and with it the workers of a DataLoader."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _stream(self) -> Generator[Row]:
        while True:
            count = 0
            for element in self.loader:
                for row in self._split(element):
                    count += 1
                    yield row
            if count == 0:
                raise DataError(
                    "DataLoadingPrimer: an epoch must yield at least one row: the dataloader yielded none. An "
                    "iterator that can be read once only cannot be used: give something with __iter__, such as a "
                    "list or a DataLoader."
                )
            self.epoch_size = count

    def _split(self, element: Any) -> Iterable[Row]:
        if isinstance(element, TensorDictBase):
            rows = element.unbind(0) if element.batch_dims else [element]
            return [row.to_dict() for row in rows]
        if isinstance(element, Mapping):
            columns = list(element.values())
            are_columns = all(isinstance(c, list | tuple) or (isinstance(c, Tensor) and c.ndim) for c in columns)
            if (
                are_columns
                and len({len(c) for c in columns}) == 1
                and (self._batched or all(isinstance(item, str) for column in columns for item in column))
            ):
                return [dict(zip(element, values, strict=True)) for values in zip(*columns, strict=True)]
            return [element]
        return element  # a list of rows


def row_source(dataloader: Any, *, shuffle: bool, seed: int) -> RowSource:
    """Indexed where the data can be indexed, iterated otherwise."""
    if hasattr(dataloader, "__getitem__") and hasattr(dataloader, "__len__"):
        return IndexedRows(dataloader, shuffle=shuffle, seed=seed)
    if not hasattr(dataloader, "__iter__"):
        raise DataError(
            f"DataLoadingPrimer: the data must be a sequence of rows or an iterable: got {type(dataloader).__name__}."
        )
    if shuffle:
        raise DataError(
            f"DataLoadingPrimer: shuffle=True needs rows that can be indexed: got {type(dataloader).__name__}, whose "
            "order is its own; shuffle there, or give a list or a datasets.Dataset."
        )
    return IteratedRows(dataloader)


def row_seeds(base: int, *parts: Sequence[int]) -> Tensor:
    """One seed per row, from a base seed and the row's identity: the same for every batch composition, rank and
    process.

    Returns  int64[B], not negative
    Source   the finaliser of splitmix64 (Steele, Lea, Flood 2014), applied once per part

    >>> row_seeds(0, [3, 4]).tolist() == [int(row_seeds(0, [3])), int(row_seeds(0, [4]))]
    True
    """
    mixed = torch.tensor((base + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64)  # the last 64 bits, signed
    for part in parts:
        mixed = mix64(mixed + GOLDEN * (torch.as_tensor(part, dtype=torch.int64) + 1))
    return mixed & 0x7FFF_FFFF_FFFF_FFFF


def next_seeds(seeds: Tensor) -> Tensor:
    """The seeds of the next turn of the same conversations, int64[B]."""
    return mix64(seeds + GOLDEN) & 0x7FFF_FFFF_FFFF_FFFF
