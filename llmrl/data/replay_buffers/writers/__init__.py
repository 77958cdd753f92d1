"""Where the next row goes."""

from llmrl.data.replay_buffers.writers.base import Writer
from llmrl.data.replay_buffers.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = ["RoundRobinWriter", "TensorDictRoundRobinWriter", "Writer"]
