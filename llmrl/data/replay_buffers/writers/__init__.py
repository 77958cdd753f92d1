"""Where the next row goes."""

from llmrl.data.replay_buffers.writers.base import Writer
from llmrl.data.replay_buffers.writers.immutable import ImmutableDatasetWriter
from llmrl.data.replay_buffers.writers.max_value import TensorDictMaxValueWriter
from llmrl.data.replay_buffers.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
