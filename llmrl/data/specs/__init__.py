"""Specs: shape, dtype, device and domain of an entry or of a whole tensordict."""

from llmrl.data.specs.base import Mismatch, TensorSpec
from llmrl.data.specs.categorical import Categorical, MultiCategorical, MultiOneHot, OneHot
from llmrl.data.specs.choice import Choice
from llmrl.data.specs.composite import Composite
from llmrl.data.specs.leaf import LeafSpec
from llmrl.data.specs.legacy import *  # noqa: F403
from llmrl.data.specs.legacy import __all__ as _OLD_NAMES
from llmrl.data.specs.non_tensor import NonTensor
from llmrl.data.specs.numeric import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from llmrl.data.specs.stacked import (
    Stacked,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)

__all__ = [
    *_OLD_NAMES,
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Choice",
    "Composite",
    "LeafSpec",
    "Mismatch",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
]
