"""Deprecated names of specs. Each warns and makes its successor, which `isinstance` and subclassing see."""

from __future__ import annotations

import warnings
from typing import Any

from llmrl.data.specs.base import TensorSpec
from llmrl.data.specs.categorical import Categorical, MultiCategorical, MultiOneHot, OneHot
from llmrl.data.specs.composite import Composite
from llmrl.data.specs.discrete import Binary
from llmrl.data.specs.non_tensor import NonTensor
from llmrl.data.specs.numeric import Bounded, UnboundedContinuous, UnboundedDiscrete
from llmrl.data.specs.stacked import Stacked, StackedComposite


class _OldName:
    def __init__(self, name: str, successor: type[TensorSpec]):
        self.__name__ = self.__qualname__ = name
        self.__doc__ = f"Deprecated: `{successor.__name__}`."
        self.__module__ = __name__
        self._successor = successor

    def __call__(self, *args: Any, **kwargs: Any) -> TensorSpec:
        warnings.warn(
            f"{self.__name__} is deprecated; use llmrl.data.{self._successor.__name__}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._successor(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._successor)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._successor)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._successor,)

    def __reduce__(self) -> str:
        return self.__name__


_SUCCESSORS: dict[str, type[TensorSpec]] = {
    "BinaryDiscreteTensorSpec": Binary,
    "BoundedTensorSpec": Bounded,
    "CompositeSpec": Composite,
    "DiscreteTensorSpec": Categorical,
    "LazyStackedCompositeSpec": StackedComposite,
    "LazyStackedTensorSpec": Stacked,
    "MultiDiscreteTensorSpec": MultiCategorical,
    "MultiOneHotDiscreteTensorSpec": MultiOneHot,
    "NonTensorSpec": NonTensor,
    "OneHotDiscreteTensorSpec": OneHot,
    "UnboundedContinuousTensorSpec": UnboundedContinuous,
    "UnboundedDiscreteTensorSpec": UnboundedDiscrete,
}
__all__ = list(_SUCCESSORS)  # the names are in the table once
globals().update({name: _OldName(name, successor) for name, successor in _SUCCESSORS.items()})
