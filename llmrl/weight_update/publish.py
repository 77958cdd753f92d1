"""`publish`: gives an engine new weights, whole or not at all. The engine owns the version; other code reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.weight_update.groups import WeightGroups, weight_groups
from llmrl.weight_update.lora import merged_weights
from llmrl.weight_update.target import named_tensors

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
Weights = Mapping[str, Tensor] | WeightGroups


class WeightTarget(Protocol):
    """Anything with weights of its own, such as an `Engine`. ``update_weights`` applies all and moves ``version``, or
    raises and changes nothing.

    takes_groups     True, if there is such an attribute: `WeightGroups` come as they are. Else they come whole
    unsaved_buffers  names, if there is such an attribute, of buffers outside its model's ``state_dict``: a set may
                     hold them, and they are left out
    """

    version: int

    def update_weights(self, weights: Weights | None, *, version: int) -> None: ...


def publish(
    model: nn.Module | TensorDictBase | Weights | None,
    engine: WeightTarget,
    version: int | None = None,
    *,
    metadata: Metadata | None = None,
    again: bool = False,
    sends: bool = True,
) -> int:
    """Gives ``engine`` the weights of ``model`` under ``version`` (default: the next one), and returns that version.
    With ``again`` that may be the version that the engine says it has.

    ``sends``: False if another rank sends to the same engine; this one only takes part in making the weights, which
    is a collective if the model is sharded.

    Reads   a module (sharded, or with adapters, which are merged in copies), a TensorDict, named tensors, or groups;
            None: the engine shares the trainer's module, so only the version moves
    Calls   ``engine.update_weights``, which checks that the set is complete. The caller stands at a step boundary, so
            no sample is drawn from half of an update
    Raises  WeightSyncError, with the engine unchanged, for a version that does not grow and for weights that lack
            one of ``metadata`` or differ from it; and, naming the engine, if it refuses

    >>> class Receiver:
    ...     version = 0
    ...     def update_weights(self, weights, *, version):
    ...         self.version = version
    >>> receiver = Receiver()
    >>> publish({"weight": torch.zeros(2)}, receiver), publish(None, receiver, version=5), receiver.version
    (1, 5, 5)
    """
    name = type(check_engine(engine, "publish")).__name__
    version = engine.version + 1 if version is None else version
    if version < engine.version + (not again):  # rows carry the version: two sets under one could not be told apart
        raise WeightSyncError(f"publish: a version must grow: got {version} after {engine.version}.")
    weights = as_weights(model)
    if not sends:
        if isinstance(weights, WeightGroups):
            weights.drain()  # the sender's gathering waits for this rank
        engine.version = version
        return version
    if weights is not None:
        _check_metadata(weights, metadata or {})
        weights = as_taken(weights, engine)
    try:
        engine.update_weights(weights, version=version)
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(
            f"publish: version {version} must reach {name}: it raised {type(error).__name__}: {error}"
        ) from error
    if engine.version != version:  # an engine that takes weights without noting the version mislabels its rows
        raise WeightSyncError(
            f"publish: {name} must be at version {version} after the update: it says {engine.version}."
        )
    return version


def as_weights(model: nn.Module | TensorDictBase | Weights | None) -> Weights | None:
    """The weights of a module in groups, of a ``peft.PeftModel`` with its adapters merged; a TensorDict as named
    tensors; anything else as it is.
    """
    if not isinstance(model, nn.Module):
        return named_tensors(model)
    return merged_weights(model) if hasattr(model, "get_base_model") else weight_groups(model)


def as_taken(weights: Weights, engine: WeightTarget) -> Weights:
    """The weights without the buffers that the engine makes by itself, and whole if it does not take groups."""
    if isinstance(weights, Mapping):
        unsaved = getattr(engine, "unsaved_buffers", frozenset())
        if unsaved.isdisjoint(weights):
            return weights
        return {name: tensor for name, tensor in weights.items() if name not in unsaved}
    if getattr(engine, "takes_groups", False):
        return weights
    return {name: tensor for group in weights for name, tensor in group.items()}


class EngineInterfaceError(ConfigError, TypeError):
    """An object that was given as an engine lacks an engine's methods."""


def check_engine(engine: WeightTarget, who: str) -> WeightTarget:
    """The engine. Raises TypeError for an object without its methods."""
    if not callable(getattr(engine, "update_weights", None)) or not hasattr(engine, "version"):
        raise EngineInterfaceError(
            f"{who}: an engine must implement RLvLLMEngine interface (update_weights(weights, *, version), version): "
            f"got {type(engine).__name__}."
        )
    return engine


def _check_metadata(weights: Weights, metadata: Metadata) -> None:
    found = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        if isinstance(weights, Mapping)
        else weights.metadata
    )
    for name, expected in metadata.items():
        if name not in found:
            raise WeightSyncError(
                f"publish: {name} must be among the weights: got {len(found)} others. Nothing was updated."
            )
        if found[name] != tuple(expected):
            raise WeightSyncError(f"publish: {name} must be {expected}: got {found[name]}. Nothing was updated.")
