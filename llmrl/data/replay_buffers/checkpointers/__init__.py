"""Checkpoints of storages: verified, atomic, and compact if rows are steps of trajectories."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.checkpointers.base import (
        FlatStorageCheckpointer,
        H5StorageCheckpointer,
        ListStorageCheckpointer,
        NestedStorageCheckpointer,
        StorageCheckpointerBase,
        StorageEnsembleCheckpointer,
        TensorStorageCheckpointer,
        default_for,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorStorageCheckpointer",
    "default_for",
]
