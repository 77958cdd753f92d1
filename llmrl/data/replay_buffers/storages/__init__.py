"""Storages: any object, tensordicts of any length, or fixed-shape rows in contiguous tensors."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.storages.base import Storage
    from llmrl.data.replay_buffers.storages.ensemble import StorageEnsemble
    from llmrl.data.replay_buffers.storages.row_list import LazyStackStorage, ListStorage
    from llmrl.data.replay_buffers.storages.tensor import LazyMemmapStorage, LazyTensorStorage, TensorStorage
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
]
