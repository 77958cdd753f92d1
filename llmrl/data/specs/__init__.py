"""Specs: shape, dtype, device and domain of an entry or of a whole tensordict."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.specs.base import Mismatch, TensorSpec
    from llmrl.data.specs.categorical import Categorical, MultiCategorical, MultiOneHot, OneHot
    from llmrl.data.specs.choice import Choice
    from llmrl.data.specs.composite import Composite
    from llmrl.data.specs.leaf import LeafSpec
    from llmrl.data.specs.legacy import (
        BinaryDiscreteTensorSpec,
        BoundedTensorSpec,
        CompositeSpec,
        DiscreteTensorSpec,
        LazyStackedCompositeSpec,
        LazyStackedTensorSpec,
        MultiDiscreteTensorSpec,
        MultiOneHotDiscreteTensorSpec,
        NonTensorSpec,
        OneHotDiscreteTensorSpec,
        UnboundedContinuousTensorSpec,
        UnboundedDiscreteTensorSpec,
    )
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
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "Binary",
    "BinaryDiscreteTensorSpec",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "Categorical",
    "Choice",
    "Composite",
    "CompositeSpec",
    "DiscreteTensorSpec",
    "LazyStackedCompositeSpec",
    "LazyStackedTensorSpec",
    "LeafSpec",
    "Mismatch",
    "MultiCategorical",
    "MultiDiscreteTensorSpec",
    "MultiOneHot",
    "MultiOneHotDiscreteTensorSpec",
    "NonTensor",
    "NonTensorSpec",
    "OneHot",
    "OneHotDiscreteTensorSpec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscrete",
    "UnboundedDiscreteTensorSpec",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
]
