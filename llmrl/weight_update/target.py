"""The weights of a model in this process: found by path, checked as a set, written in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError, WeightSyncError, did_you_mean
from llmrl.weight_update.publish import named_tensors


class ModelTarget:
    """A model that `publish` can write into: a module, or named tensors (a mapping, a TensorDict).

    A module needs every name of its ``state_dict``, and a tied weight under at least one of its names. The weights may
    contain buffers that the ``state_dict`` omits; these are not written. Floating-point weights are converted to the
    dtype of the model; other dtypes must be equal.

    adopts   parameters of a module become views of the given tensors, without a copy, if device and dtype are equal

    >>> target = ModelTarget(nn.Linear(2, 1))
    >>> target.update_weights({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, version=1)
    >>> target.model(torch.ones(2)).item()
    2.0
    >>> target.update_weights({"weight": torch.ones(1, 2)}, version=2)
    Traceback (most recent call last):
    llmrl.errors.WeightSyncError: Linear: 'bias' is missing from the weights. Nothing was updated.
    """

    def __init__(self, model: nn.Module | TensorDictBase | Mapping[str, Tensor], *, adopts: bool = False) -> None:
        self.model, self.version, self._adopts = model, 0, adopts

    def check(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name. Raises WeightSyncError if ``weights`` do not fit them."""
        module = self.model if isinstance(self.model, nn.Module) else None
        own = named_tensors(self.model) if module is None else module.state_dict(keep_vars=True)
        check_weights(own, weights, who=type(self.model).__name__, module=module)
        return own

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Writes all weights, or raises WeightSyncError and writes none."""
        if weights is not None:
            own = self.check(weights)
            places, values = [], []
            for name, new in weights.items():
                if (old := own.get(name)) is None:
                    continue  # a buffer that the state_dict omits
                if (
                    self._adopts
                    and isinstance(old, nn.Parameter)
                    and (old.dtype, old.device) == (new.dtype, new.device)
                ):
                    old.data = new  # keeps the Parameter object, which optimizers and wrappers refer to
                else:
                    places.append(old)
                    values.append(new)
            if places:
                torch._foreach_copy_(places, values)  # one call: there may be thousands
        self.version = version


def check_weights(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, who: str, module: nn.Module | None = None
) -> None:
    """Raises WeightSyncError unless ``weights`` can replace all of ``own``. Names of one tensor count as one weight.

    module  weights may also have the names of its buffers
    """
    unknown = weights.keys() - own.keys()
    if unknown and module is not None:
        unknown -= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if unknown:
        names = sorted(unknown)
        raise WeightSyncError(
            f"{who}: no weight is called {_some(names)}.{did_you_mean(names[0], own)} Nothing was updated."
        )
    given: dict[int, str] = {}
    for name, new in weights.items():
        if (old := own.get(name)) is None:
            continue
        converts = new.dtype == old.dtype or (old.is_floating_point() and new.is_floating_point())
        if new.shape != old.shape or not converts:
            raise WeightSyncError(
                f"{who}: {name!r} must be {old.dtype} {tuple(old.shape)}: got {new.dtype} {tuple(new.shape)}. Nothing "
                "was updated."
            )
        first = given.setdefault(id(old), name)
        if first != name and weights[first] is not new and not torch.equal(weights[first], new):
            raise WeightSyncError(
                f"{who}: {first} and {name} are tied in this model and must be equal. Nothing was updated."
            )
    missing = {id(old): name for name, old in reversed([*own.items()]) if id(old) not in given}
    if missing:
        names = sorted(missing.values())
        raise WeightSyncError(
            f"{who}: {_some(names)} {'is' if len(names) == 1 else 'are'} missing from the weights. Nothing was updated."
        )


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def resolve(context: Any, path: str) -> Any:
    """The object at an attribute path.

    >>> resolve(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "[0].bias").shape
    torch.Size([1])
    """
    value, done = context, ""
    for part in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        try:
            if part.startswith("["):
                key = part[1:-1].strip("'\"")
                value = value[int(key) if re.fullmatch(r"-?\d+", key) else key]
            else:
                value = getattr(value, part)
        except (AttributeError, LookupError, TypeError) as error:
            raise ConfigError(
                f"weights of {path!r}: {type(value).__name__} at {done or 'the start'!r} must have {part!r}: "
                f"{type(error).__name__}: {error}. A model id is an attribute path such as 'policy' or "
                "'env.transform[0].actor'."
            ) from error
        done += part if part.startswith("[") or not done else f".{part}"
    return value
