"""A data set that is read and never written."""

from __future__ import annotations

from typing import Any, NoReturn

from llmrl.data.replay_buffers.writers.base import Writer


class ImmutableDatasetWriter(Writer):
    """Refuses every write: RuntimeError.

    >>> from llmrl.data.replay_buffers import ReplayBuffer, TensorStorage
    >>> import torch
    >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(5)), writer=ImmutableDatasetWriter(), batch_size=2)
    >>> len(buffer)
    5
    >>> buffer.add(torch.tensor(5))
    Traceback (most recent call last):
    RuntimeError: ImmutableDatasetWriter: a data set is not written to: got add; copy its rows into another buffer.
    """

    def add(self, data: Any) -> NoReturn:
        self._refuse("add")

    def extend(self, data: Any) -> NoReturn:
        self._refuse("extend")

    def as_stored(self, data: Any, index: Any) -> NoReturn:
        self._refuse("rows to replace others")

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        self._refuse("empty")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__}: a data set is not written to: got {what}; copy its rows into another buffer."
        )
