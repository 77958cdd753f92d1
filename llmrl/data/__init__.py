"""Data: specs here; buffers in `llmrl.data.replay_buffers`, conversations in `llmrl.data.llm`."""

from llmrl.data.specs import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Composite,
    NonTensor,
    TensorSpec,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)

__all__ = [
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "NonTensor",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]
