"""Writers: choose the positions of new rows."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.writers.base import RoundRobinWriter, TensorDictRoundRobinWriter, Writer
    from llmrl.data.replay_buffers.writers.max_value import TensorDictMaxValueWriter
    from llmrl.data.replay_buffers.writers.read_only import ImmutableDatasetWriter, WriterEnsemble
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]
