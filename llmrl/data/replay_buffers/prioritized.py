"""The two prioritized buffers: each builds a ``PrioritizedSampler`` of the size of its storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.samplers import PrioritizedSampler
from llmrl.data.replay_buffers.storages import ListStorage, Storage
from llmrl.data.replay_buffers.tensordict import TensorDictReplayBuffer

__all__ = ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` whose sampler is ``PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)``.

    The other arguments are those of ``ReplayBuffer``; the storage is ``ListStorage(1000)`` by default.

    >>> buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, batch_size=4)
    >>> index = buffer.extend([torch.zeros(2), torch.ones(2)])
    >>> buffer.update_priority(index, torch.tensor([0.1, 2.0]))
    >>> batch, info = buffer.sample(return_info=True)
    >>> batch.shape, info["priority_weight"].shape
    (torch.Size([4, 2]), torch.Size([4]))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Storage | Callable[[], Storage] | None = None,
        **arguments: Any,
    ) -> None:
        storage = _storage("PrioritizedReplayBuffer", storage, arguments)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)
        super().__init__(storage=storage, sampler=sampler, **arguments)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A ``TensorDictReplayBuffer`` whose sampler is a ``PrioritizedSampler`` of the size of the storage.

    Priorities are read from ``priority_key`` of written rows and by ``update_tensordict_priority``; ``reduction``
    reduces a row's several values to one. The other arguments are those of ``TensorDictReplayBuffer``.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> storage = LazyTensorStorage(10)
    >>> buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=5)
    >>> _ = buffer.extend(TensorDict(a=torch.arange(4), td_error=torch.tensor([0.0, 0.0, 3.0, 0.0]), batch_size=[4]))
    >>> batch = buffer.sample()
    >>> batch["a"].tolist(), batch["priority_weight"].shape
    ([2, 2, 2, 2, 2], torch.Size([5]))
    >>> batch["td_error"] = torch.full((5,), 0.5)
    >>> buffer.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: str | tuple[str, ...] = "td_error",
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        reduction: str = "max",
        **arguments: Any,
    ) -> None:
        storage = _storage("TensorDictPrioritizedReplayBuffer", storage, arguments)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, storage=storage, sampler=sampler, **arguments)


def _storage(who: str, storage: Storage | Callable[[], Storage] | None, arguments: dict[str, Any]) -> Storage:
    """The storage, built now, because the sampler needs its size."""
    if "sampler" in arguments:
        raise TypeError(f"{who}: it makes its own sampler: got another one; ReplayBuffer takes any.")
    if storage is None:
        return ListStorage(1000)
    return storage if isinstance(storage, Storage) else storage()
