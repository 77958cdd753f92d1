"""Deprecated names of specs. Calling one warns and makes its successor; `isinstance` and subclassing work too."""

from __future__ import annotations

import warnings
from typing import Any

from llmrl.data.specs.base import TensorSpec
from llmrl.data.specs.categorical import Categorical, MultiCategorical, MultiOneHot, OneHot
from llmrl.data.specs.composite import Composite
from llmrl.data.specs.non_tensor import NonTensor
from llmrl.data.specs.numeric import Binary, Bounded, UnboundedContinuous, UnboundedDiscrete
from llmrl.data.specs.stacked import Stacked, StackedComposite


class _OldName(type(TensorSpec)):
    """The class of the old names: calling one makes its successor, whose instances count as instances of the old name.

    A subclass of an old name is an ordinary class.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> TensorSpec:
        successor = vars(cls).get("_successor")
        if successor is None:
            return super().__call__(*args, **kwargs)
        warnings.warn(
            f"{cls.__name__} is deprecated; use llmrl.data.{successor.__name__}.", DeprecationWarning, stacklevel=2
        )
        return successor(*args, **kwargs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        successor = vars(cls).get("_successor")
        # not issubclass(): an abstract class asks all its subclasses, and this is one of them
        return super().__subclasscheck__(subclass) if successor is None else successor in subclass.__mro__


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
for _name, _class in _SUCCESSORS.items():
    _doc = f"Deprecated: `{_class.__name__}`."
    globals()[_name] = _OldName(_name, (_class,), {"__doc__": _doc, "__module__": __name__, "_successor": _class})
