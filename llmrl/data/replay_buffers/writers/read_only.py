"""Writers that refuse rows: that of a data set, and that of an ensemble, whose members are written to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from llmrl.data.replay_buffers.members import Members, refused
from llmrl.data.replay_buffers.writers.base import Writer

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.storages import StorageEnsemble

_read_only = partial(refused, rule="a data set is not written to", advice="copy its rows into another buffer")


class ImmutableDatasetWriter(Writer):
    """Raises RuntimeError on every write.

    >>> from llmrl.data.replay_buffers import ReplayBuffer, TensorStorage
    >>> import torch
    >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(5)), writer=ImmutableDatasetWriter(), batch_size=2)
    >>> len(buffer)
    5
    >>> buffer.add(torch.tensor(5))
    Traceback (most recent call last):
    RuntimeError: ImmutableDatasetWriter: a data set is not written to: got add; copy its rows into another buffer.
    """

    add, extend, empty = map(_read_only, ("add", "extend", "empty"))
    as_stored = _read_only("rows to replace others")


class WriterEnsemble(Members, Writer):
    """Several writers. ``ensemble[i].add(row)`` writes; the ensemble itself raises RuntimeError."""

    _held_in = "writers"

    def __init__(self, *writers: Writer) -> None:
        self.writers = self._checked(writers, Writer)

    def register_storage(self, storage: StorageEnsemble) -> None:
        for writer, member in zip(self.writers, storage.storages, strict=True):
            writer.register_storage(member)

    @property
    def write_count(self) -> int:
        """The total number of rows ever written to the members."""
        return sum(writer.write_count for writer in self.writers)

    add, extend, empty, cursor = refused("add"), refused("extend"), refused("empty"), property(refused("cursor"))

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [writer.state_dict() for writer in self.writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for writer, part in self._pairs(state["writers"]):
            writer.load_state_dict(part)
