"""`publish`: gives an engine new weights, all or nothing. The engine owns the version; other code reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.weight_update.groups import Metadata, WeightGroups, weight_groups

Weights = Mapping[str, Tensor] | WeightGroups


class WeightTarget(Protocol):
    """An object that has its own weights, such as an `Engine`. ``update_weights`` either applies all weights and sets
    ``version``, or raises and changes nothing.

    takes_groups     optional; True: it receives `WeightGroups` as they are. Otherwise it receives a mapping
    unsaved_buffers  optional; names of buffers outside its model's ``state_dict``: weights may contain them, and
                     they are left out
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
    With ``again`` it may also be the engine's current version.

    ``sends``: False if another rank sends to the same engine; this rank only takes part in gathering the weights,
    which is a collective if the model is sharded.

    Reads   a module (may be sharded, or have adapters, which are merged in copies), a TensorDict, named tensors, or
            groups; None: the engine shares the trainer's module, so only the version changes
    Calls   ``engine.update_weights``, which checks that the set is complete. The caller must be at a step boundary,
            so that no sample is drawn during an update
    Raises  WeightSyncError, with the engine unchanged, if the version does not increase, or a weight of ``metadata``
            is missing or differs; also, naming the engine, if the engine refuses the weights

    >>> import torch
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
    if version < engine.version + (not again):  # rows record the version: it must identify one set of weights
        raise WeightSyncError(f"publish: a version must grow: got {version} after {engine.version}.")
    weights = as_weights(model)
    if not sends:
        if isinstance(weights, WeightGroups):
            weights.drain()  # the sending rank's collectives wait for this rank
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
    if engine.version != version:  # an engine that does not store the version would mislabel its rows
        raise WeightSyncError(
            f"publish: {name} must be at version {version} after the update: its version is {engine.version}."
        )
    return version


def as_weights(model: nn.Module | TensorDictBase | Weights | None) -> Weights | None:
    """A module's weights in groups (with adapters merged, for a ``peft.PeftModel``); a TensorDict as named tensors;
    any other value unchanged.
    """
    if not isinstance(model, nn.Module):
        return named_tensors(model)
    if hasattr(model, "get_base_model"):
        from llmrl.weight_update.lora import merged_weights

        return merged_weights(model)
    return weight_groups(model)


def named_tensors(weights: Any) -> Any:
    """A module or a TensorDict as a flat mapping of dotted names that shares its memory; other values unchanged."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    return dict(weights.flatten_keys(".").items()) if isinstance(weights, TensorDictBase) else weights


def as_taken(weights: Weights, engine: WeightTarget) -> Weights:
    """The weights without ``engine.unsaved_buffers``, and as a mapping if the engine does not take groups."""
    if isinstance(weights, Mapping):
        unsaved = getattr(engine, "unsaved_buffers", frozenset())
        if unsaved.isdisjoint(weights):
            return weights
        return {name: tensor for name, tensor in weights.items() if name not in unsaved}
    if getattr(engine, "takes_groups", False):
        return weights
    return weights.built()


class EngineInterfaceError(ConfigError, TypeError):
    """An object passed as an engine lacks an engine's methods."""


def check_engine(engine: WeightTarget, who: str) -> WeightTarget:
    """Returns ``engine``. Raises TypeError if it lacks an engine's methods."""
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
