"""Replay buffers: rows in, batches out, over a storage, a sampler and a writer."""

from typing import TYPE_CHECKING

from llmrl.data.replay_buffers import checkpointers, samplers, storages, writers
from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.buffer import ReplayBuffer
    from llmrl.data.replay_buffers.checkpointers import *  # noqa: F403
    from llmrl.data.replay_buffers.ensemble import ReplayBufferEnsemble
    from llmrl.data.replay_buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
    from llmrl.data.replay_buffers.ray_buffer import RayReplayBuffer
    from llmrl.data.replay_buffers.remote import RemoteBuffer, RemoteTensorDictReplayBuffer
    from llmrl.data.replay_buffers.samplers import *  # noqa: F403
    from llmrl.data.replay_buffers.storages import *  # noqa: F403
    from llmrl.data.replay_buffers.tensordict import TensorDictReplayBuffer
    from llmrl.data.replay_buffers.writers import *  # noqa: F403
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "PrioritizedReplayBuffer",
    "RayReplayBuffer",
    "RemoteBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
__all__ += checkpointers.__all__
__all__ += samplers.__all__
__all__ += storages.__all__
__all__ += writers.__all__
