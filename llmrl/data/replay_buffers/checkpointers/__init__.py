"""Storages on disk: checked, atomic, and compact where rows are steps of trajectories."""

from llmrl.data.replay_buffers.checkpointers.base import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from llmrl.data.replay_buffers.checkpointers.ensemble import StorageEnsembleCheckpointer

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorStorageCheckpointer",
]
