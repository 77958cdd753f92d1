"""Several numbers of a row as one: how priorities and ranks are reduced."""

from __future__ import annotations

from torch import Tensor

from llmrl.errors import did_you_mean

_REDUCTIONS = {
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
    "median": lambda values: values.median(1).values,
    "mean": lambda values: values.mean(1),
    "sum": lambda values: values.sum(1),
}


def check_reduction(who: str, name: str) -> str:
    """``name``, if it is that of a reduction; else ValueError."""
    if name not in _REDUCTIONS:
        raise ValueError(
            f"{who}: reduction must be one of {', '.join(_REDUCTIONS)}: got {name!r}."
            f"{did_you_mean(str(name), _REDUCTIONS)}"
        )
    return name


def reduced(values: Tensor, name: str) -> Tensor:
    """``values``, [N, ...], as one number per row: [N]."""
    return _REDUCTIONS[name](values.reshape(len(values), -1))
