"""Replay buffers: rows in, batches out, over a storage, a sampler and a writer."""

from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from llmrl.data.replay_buffers.storages import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from llmrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer

__all__ = [
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Storage",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]
