"""Weight updaters: what a collector calls when the trainer has new weights. Adapters over `llmrl.weight_update`.

How weights travel and when a set of them is whole is the publisher's part. An updater says where they come from and
which workers get them, and tells its collector afterwards, so that the policy version moves once per update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import WeightSyncError
from llmrl.weight_update import WeightPublisher

__all__ = ["PublisherUpdater", "VanillaWeightUpdater", "WeightUpdaterBase"]

Weights = Mapping[str, Tensor] | None


class VersionedCollector(Protocol):
    """What an updater needs of its collector."""

    def increment_version(self) -> None: ...


class WeightUpdaterBase(ABC):
    """Extension point: a subclass writes ``_sync_weights_with_worker`` and, where they differ, the other three.

    ``_get_server_weights()``       weights to push where the caller gives none; None: the receiver shares the trainer's
                                    module
    ``_maybe_map_weights(weights)`` renames or converts them for the receiver
    ``all_worker_ids()``            the workers; None: one, without an id
    """

    def __init__(self) -> None:
        self.collector: VersionedCollector | None = None

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Weights) -> None:
        """Makes the worker hold ``server_weights``, all or nothing."""

    def _get_server_weights(self) -> Weights:
        return None

    def _maybe_map_weights(self, server_weights: Weights) -> Weights:
        return server_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        return None

    def register_collector(self, collector: VersionedCollector) -> None:
        """Called by the collector that the updater belongs to."""
        self.collector = collector

    def push_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None,
        worker_ids: Any | Sequence[Any] | None = None,
    ) -> None:
        """Sends weights to ``worker_ids`` (None: all), then moves the collector's policy version.

        Reads   a module (its state dict), a TensorDict or a mapping of named tensors; None: ``_get_server_weights()``
        """
        weights = named_tensors(policy_or_weights) if policy_or_weights is not None else self._get_server_weights()
        weights = self._maybe_map_weights(weights)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        for worker_id in ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
        if self.collector is not None:
            self.collector.increment_version()


class PublisherUpdater(WeightUpdaterBase):
    """Pushes through a `WeightPublisher` to engines in this process."""

    def __init__(self, publisher: WeightPublisher):
        super().__init__()
        self.publisher = publisher

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Weights) -> None:
        self.publisher.publish(server_weights)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy in this process.

    Reads   ``weight_getter()`` where no weights are given
    Writes  ``policy_weights``: the tensors (or the module) to write into, by name
    Raises  WeightSyncError, with nothing written, where names or shapes differ
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], nn.Module | TensorDictBase | Mapping[str, Tensor]] | None = None,
        policy_weights: nn.Module | TensorDictBase | Mapping[str, Tensor],
    ):
        super().__init__()
        self.weight_getter = weight_getter
        self.policy_weights = named_tensors(policy_weights)

    def _get_server_weights(self) -> Weights:
        return named_tensors(self.weight_getter()) if self.weight_getter is not None else None

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Weights) -> None:
        if server_weights is None:
            raise WeightSyncError(
                "VanillaWeightUpdater: weights to copy must be given, to the call or by a weight_getter: got neither."
            )
        mine = {name: tensor.shape for name, tensor in self.policy_weights.items()}
        given = {name: tensor.shape for name, tensor in server_weights.items()}
        if mine != given:
            names = sorted(name for name in mine.keys() | given.keys() if mine.get(name) != given.get(name))
            raise WeightSyncError(
                f"VanillaWeightUpdater: names and shapes must be the policy's: {len(names)} differ, first "
                f"{names[0]!r}: got {given.get(names[0])}, expected {mine.get(names[0])}; nothing was written."
            )
        for name, tensor in server_weights.items():
            self.policy_weights[name].detach().copy_(tensor)


def named_tensors(weights: nn.Module | TensorDictBase | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights as a flat mapping of dotted names, sharing memory with what was given."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    if isinstance(weights, TensorDictBase):
        return dict(weights.flatten_keys(".").items())
    return weights
