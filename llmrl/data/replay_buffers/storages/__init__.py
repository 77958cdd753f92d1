"""Storages: any object, tensordicts of any length, or fixed-shape rows in contiguous tensors."""

from llmrl.data.replay_buffers.storages.base import Storage
from llmrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from llmrl.data.replay_buffers.storages.row_list import LazyStackStorage, ListStorage
from llmrl.data.replay_buffers.storages.tensor import LazyMemmapStorage, LazyTensorStorage, TensorStorage

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
]
