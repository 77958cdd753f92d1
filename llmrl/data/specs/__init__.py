"""Specs: what an entry, or a whole tensordict, may be. One file per family; `shape` has the algebra that all share."""

from llmrl.data.specs.base import LeafSpec, Mismatch, TensorSpec
from llmrl.data.specs.categorical import Categorical
from llmrl.data.specs.composite import Composite
from llmrl.data.specs.non_tensor import NonTensor
from llmrl.data.specs.numeric import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
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
    "LeafSpec",
    "Mismatch",
    "NonTensor",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]
