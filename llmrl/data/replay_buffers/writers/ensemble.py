"""Several writers as one."""

from __future__ import annotations

from typing import Any

from llmrl.data.replay_buffers.members import Members, refused
from llmrl.data.replay_buffers.storages import StorageEnsemble
from llmrl.data.replay_buffers.writers.base import Writer


class WriterEnsemble(Members, Writer):
    """Several writers. ``ensemble[i].add(row)`` writes; the ensemble itself does not know where to: RuntimeError."""

    def __init__(self, *writers: Writer) -> None:
        self.writers = self._checked(writers, Writer)

    @property
    def _members(self) -> tuple[Writer, ...]:
        return self.writers

    def register_storage(self, storage: StorageEnsemble) -> None:
        for writer, member in zip(self.writers, storage.storages, strict=True):
            writer.register_storage(member)

    @property
    def write_count(self) -> int:
        """The number of rows ever written, to all members."""
        return sum(writer.write_count for writer in self.writers)

    add, extend, empty, cursor = refused("add"), refused("extend"), refused("empty"), property(refused("cursor"))

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [writer.state_dict() for writer in self.writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for writer, part in self._pairs(state["writers"]):
            writer.load_state_dict(part)
