"""Writers: choose the positions of new rows."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.writers.base import (
        ImmutableDatasetWriter,
        RoundRobinWriter,
        TensorDictRoundRobinWriter,
        Writer,
        WriterEnsemble,
    )
    from llmrl.data.replay_buffers.writers.max_value import TensorDictMaxValueWriter
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
