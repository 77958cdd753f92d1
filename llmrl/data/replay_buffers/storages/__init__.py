"""Where rows are kept: any object, tensordicts of any length, or fixed-shape rows in contiguous tensors."""

from llmrl.data.replay_buffers.storages.base import Storage
from llmrl.data.replay_buffers.storages.lazy_stack import LazyStackStorage
from llmrl.data.replay_buffers.storages.list_storage import ListStorage
from llmrl.data.replay_buffers.storages.tensor import LazyMemmapStorage, LazyTensorStorage, TensorStorage

__all__ = ["LazyMemmapStorage", "LazyStackStorage", "LazyTensorStorage", "ListStorage", "Storage", "TensorStorage"]
