"""Publishes weights, under a version, to receivers in the same process.

A receiver is anything with ``version`` and ``update_weights`` (every `Engine`). This file decides whether a set of
weights is the one that was agreed on, and says whose fault it is when it does not arrive; how it is applied is the
receiver's part, when it is published the collector's. Other transports put another receiver behind the same two
methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmrl.errors import ConfigError, WeightSyncError, did_you_mean
from llmrl.weight_update.groups import WeightGroups

__all__ = ["WeightPublisher", "WeightReceiver"]

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


class WeightReceiver(Protocol):
    """Where weights are needed. ``update_weights`` applies all and moves ``version``, or raises and changes nothing.

    takes_groups     True, where there is such an attribute: `WeightGroups` come as they are. Else they come whole
    unsaved_buffers  names, where there is such an attribute, of buffers outside its model's ``state_dict``: a set may
                     hold them, and they are left out
    """

    version: int

    def update_weights(self, weights: Mapping[str, Tensor] | WeightGroups | None, *, version: int) -> None: ...


class WeightPublisher:
    """Sends versioned weights to every receiver.

    Reads   ``metadata``: {name: (dtype, shape)} of a complete set; None: the first set that is published
    Calls   ``receiver.update_weights(weights, version=version)`` on each, at the moment of `publish`: the caller stands
            at a step boundary, so no sample is drawn from half of an update
    Raises  WeightSyncError, with no receiver touched, for names, shapes or dtypes that are not those of ``metadata``, a
            version that does not grow; and where a receiver refuses, naming it

    >>> class Receiver:
    ...     version = 0
    ...     def update_weights(self, weights, *, version):
    ...         self.version = version
    >>> receiver = Receiver()
    >>> WeightPublisher([receiver]).publish({"weight": torch.zeros(2)}), receiver.version
    (1, 1)
    """

    def __init__(self, receivers: Sequence[WeightReceiver], *, metadata: Metadata | None = None):
        self.receivers = list(receivers)
        for receiver in self.receivers:
            if not callable(getattr(receiver, "update_weights", None)):
                raise ConfigError(
                    "WeightPublisher: a receiver must have update_weights(weights, *, version): got "
                    f"{type(receiver).__name__}."
                )
        self.metadata = dict(metadata) if metadata is not None else None
        self.version = max((receiver.version for receiver in self.receivers), default=0)

    def publish(self, weights: Mapping[str, Tensor] | WeightGroups | None, *, version: int | None = None) -> int:
        """Sends ``weights`` as ``version`` (default: the next one). None: receivers share the trainer's module, so only
        the version moves. Groups are made once for each receiver. Returns the version that now holds everywhere."""
        version = self.version + 1 if version is None else version
        if version <= self.version:
            raise WeightSyncError(f"WeightPublisher: a version must grow: got {version} after {self.version}.")
        if weights is not None:
            weights = self._without_buffers(weights)
            self._check(weights)
        for receiver in self.receivers:
            name = type(receiver).__name__
            try:
                receiver.update_weights(_taken_by(receiver, weights), version=version)
            except WeightSyncError:
                raise
            except Exception as error:
                raise WeightSyncError(
                    f"WeightPublisher: version {version} must reach every receiver: {name} raised "
                    f"{type(error).__name__}: {error}"
                ) from error
            if receiver.version != version:
                raise WeightSyncError(
                    f"WeightPublisher: {name} must be at version {version} after the update: it says "
                    f"{receiver.version}."
                )
        self.version = version
        return version

    def _without_buffers(self, weights: Mapping[str, Tensor] | WeightGroups) -> Mapping[str, Tensor] | WeightGroups:
        if not isinstance(weights, Mapping):
            return weights
        unsaved = frozenset().union(*(getattr(receiver, "unsaved_buffers", ()) for receiver in self.receivers))
        if unsaved.isdisjoint(weights):
            return weights
        return {name: tensor for name, tensor in weights.items() if name not in unsaved}

    def _check(self, weights: Mapping[str, Tensor] | WeightGroups) -> None:
        if isinstance(weights, WeightGroups):
            found = weights.metadata
        else:
            found = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        if self.metadata is None:
            self.metadata = found
        elif found != self.metadata:
            raise WeightSyncError(f"WeightPublisher: {_difference(self.metadata, found)}")


def _taken_by(
    receiver: WeightReceiver, weights: Mapping[str, Tensor] | WeightGroups | None
) -> Mapping[str, Tensor] | WeightGroups | None:
    if not isinstance(weights, WeightGroups) or getattr(receiver, "takes_groups", False):
        return weights
    return {name: tensor for group in weights for name, tensor in group.items()}


def _difference(expected: Metadata, found: Metadata) -> str:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        parts = [f"missing {_some(missing)}"] if missing else []
        parts += [f"not expected {_some(extra)}"] if extra else []
        hint = did_you_mean(extra[0], missing) if extra else ""
        return f"the names must be those of the model: {'; '.join(parts)}.{hint} No receiver was updated."
    name = next(name for name in expected if expected[name] != found[name])
    (dtype, shape), (got_dtype, got_shape) = expected[name], found[name]
    return f"{name!r} must be {dtype} {tuple(shape)}: got {got_dtype} {tuple(got_shape)}. No receiver was updated."


def _some(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
