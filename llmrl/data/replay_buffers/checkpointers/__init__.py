"""Storages on disk: checked, atomic, and compact where rows are steps of trajectories."""

from llmrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from llmrl.data.replay_buffers.checkpointers.ensemble import StorageEnsembleCheckpointer, default_for
from llmrl.data.replay_buffers.checkpointers.named import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
)

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
