"""Weight updaters: what a collector calls when the trainer has new weights. Faces of `llmrl.weight_update.publish`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import WeightSyncError
from llmrl.weight_update import WeightGroups, publish
from llmrl.weight_update.publish import check_engine

__all__ = ["EngineUpdater", "VanillaWeightUpdater", "WeightUpdaterBase"]

Weights = nn.Module | TensorDictBase | Mapping[str, Tensor] | WeightGroups


class VersionedCollector(Protocol):
    """The method that an updater calls on its collector."""

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
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        """Makes the worker hold ``server_weights``, all or nothing."""

    def _get_server_weights(self) -> Any:
        return None

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        return server_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        return None

    def register_collector(self, collector: VersionedCollector) -> None:
        """Called by the collector that the updater belongs to."""
        self.collector = collector

    def push_weights(
        self, policy_or_weights: Weights | None = None, worker_ids: Any | Sequence[Any] | None = None
    ) -> None:
        """Sends weights to ``worker_ids`` (None: all), then tells the collector.

        Reads   a module, a TensorDict, a mapping of named tensors, or groups; None: ``_get_server_weights()``
        """
        weights = self._get_server_weights() if policy_or_weights is None else self._as_weights(policy_or_weights)
        weights = self._maybe_map_weights(weights)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        for worker_id in ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
        if self.collector is not None:
            self.collector.increment_version()

    def _as_weights(self, given: Weights) -> Any:
        return named_tensors(given)


class EngineUpdater(WeightUpdaterBase):
    """Publishes to one engine, the collector's own by default."""

    def __init__(self, engine: Any = None):
        super().__init__()
        self._engine = None if engine is None else check_engine(engine, type(self).__name__)
        self._metadata: Mapping[str, Any] | None = None

    def register_collector(self, collector: VersionedCollector) -> None:
        super().register_collector(collector)
        if self._engine is None:
            self._engine = getattr(getattr(collector, "policy", None), "engine", None)

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        if self._engine is not None:  # a policy without an engine has nothing to update
            publish(server_weights, self._engine, metadata=self._metadata)


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

    def _get_server_weights(self) -> Mapping[str, Tensor] | None:
        return named_tensors(self.weight_getter()) if self.weight_getter is not None else None

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Mapping[str, Tensor] | None) -> None:
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


def named_tensors(weights: Any) -> Any:
    """A module or a TensorDict as a flat mapping of dotted names that shares its memory; anything else as it is."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    return dict(weights.flatten_keys(".").items()) if isinstance(weights, TensorDictBase) else weights
