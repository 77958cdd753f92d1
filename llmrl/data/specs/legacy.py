"""Deprecated names of specs. Calling one warns and builds its successor; `isinstance` and subclassing also work."""

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
    """Metaclass of the old names: calling one builds its successor, whose instances count as instances of the old name.

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
        # not issubclass(): ABCMeta checks all subclasses of the successor, and cls is one of them: endless recursion
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
__all__ = list(_SUCCESSORS)
for _name, _class in _SUCCESSORS.items():
    _doc = f"Deprecated: `{_class.__name__}`."
    globals()[_name] = _OldName(_name, (_class,), {"__doc__": _doc, "__module__": __name__, "_successor": _class})
