"""Weight updaters, which a collector calls when the trainer has new weights; they use `llmrl.weight_update`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl import weight_update
from llmrl.errors import WeightSyncError
from llmrl.weight_update.groups import WeightGroups
from llmrl.weight_update.publish import check_engine, named_tensors, publish

if TYPE_CHECKING:
    from llmrl.weight_update import WeightSyncScheme

Weights = nn.Module | TensorDictBase | Mapping[str, Tensor] | WeightGroups


class WeightUpdaterBase(ABC):
    """Extension point: a subclass implements ``_sync_weights_with_worker`` and, if necessary, the other three.

    ``_get_server_weights()``       weights to push if the caller gives none; None: the receiver shares the trainer's
                                    module
    ``_maybe_map_weights(weights)`` renames or converts weights for the receiver
    ``all_worker_ids()``            the workers; None: there is one, without an id
    """

    def __init__(self) -> None:
        self.collector: Any = None

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        """Updates the worker to ``server_weights``, all or nothing."""

    def _sync_weights(self, *, worker_ids: Sequence[Any], server_weights: Any) -> None:
        for worker_id in worker_ids:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)

    def _get_server_weights(self) -> Any:
        return None

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        return server_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        return None

    def register_collector(self, collector: Any) -> None:
        """Sets the collector that the updater belongs to, whose ``increment_version`` it calls."""
        self.collector = collector

    def push_weights(
        self, policy_or_weights: Weights | None = None, worker_ids: Any | Sequence[Any] | None = None
    ) -> None:
        """Sends weights to ``worker_ids`` (None: all), then increments the collector's version.

        Reads   a module, a TensorDict, a mapping of named tensors, or groups; None: ``_get_server_weights()``
        """
        weights = self._get_server_weights() if policy_or_weights is None else self._as_weights(policy_or_weights)
        weights = self._maybe_map_weights(weights)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        ids = ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
        self._sync_weights(worker_ids=ids, server_weights=weights)
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

    def register_collector(self, collector: Any) -> None:
        super().register_collector(collector)
        if self._engine is None:
            self._engine = getattr(getattr(collector, "policy", None), "engine", None)

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        if self._engine is not None:  # without an engine there is nothing to update
            publish(server_weights, self._engine, metadata=self._metadata)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy in this process.

    Reads   ``weight_getter()`` if no weights are given
    Writes  ``policy_weights``: the module, or the tensors to write into by name
    Raises  WeightSyncError, with nothing written, if they do not fit
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], nn.Module | TensorDictBase | Mapping[str, Tensor]] | None = None,
        policy_weights: nn.Module | TensorDictBase | Mapping[str, Tensor],
    ):
        super().__init__()
        self.weight_getter, self.policy_weights = weight_getter, policy_weights
        self._target = weight_update.ModelTarget(policy_weights)

    def _get_server_weights(self) -> Mapping[str, Tensor] | None:
        return named_tensors(self.weight_getter()) if self.weight_getter is not None else None

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Mapping[str, Tensor] | None) -> None:
        if server_weights is None:
            raise WeightSyncError(
                "VanillaWeightUpdater: weights to copy must be given, to the call or by a weight_getter: got neither."
            )
        publish(server_weights, self._target)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Copies weights into tensors that workers share, one set for each device. A worker may read a mixture of two
    versions; `SharedMemWeightSyncScheme` prevents that.

    get_server_weights  returns the weights if none are given
    policy_weights      {device: TensorDict in shared memory}; worker ids are the devices
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], TensorDictBase] | None,
        policy_weights: Mapping[Any, TensorDictBase],
    ):
        super().__init__()
        self._getter = get_server_weights
        self._copiers = {
            device: VanillaWeightUpdater(policy_weights=weights) for device, weights in policy_weights.items()
        }

    def all_worker_ids(self) -> Sequence[Any]:
        return list(self._copiers)

    def _get_server_weights(self) -> Any:
        return None if self._getter is None else named_tensors(self._getter())

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        self._copiers[worker_id]._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)


class SenderWeightUpdater(WeightUpdaterBase):
    """Sends weights by a `WeightSyncScheme`, and waits until the workers have them.

    policy_weights  sent if no weights are given
    workers         each worker's ``pipe_or_context`` for the scheme, in order of the worker ids
    """

    def __init__(self, scheme: WeightSyncScheme, policy_weights: Weights | None, workers: Iterable[Any]):
        super().__init__()
        self._policy_weights, self.sender = policy_weights, scheme.create_sender()
        self._ids: list[int] = []
        for worker_id, worker in enumerate(workers):
            self.sender.register_worker(worker_id, worker)
            self._ids.append(worker_id)

    def all_worker_ids(self) -> Sequence[int]:
        return self._ids

    def _get_server_weights(self) -> Any:
        return self._policy_weights

    def _sync_weights(self, *, worker_ids: Sequence[Any], server_weights: Any) -> None:
        if worker_ids:
            self.sender.update_weights(server_weights, worker_ids=worker_ids)
            self.sender.wait()

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        self._sync_weights(worker_ids=[worker_id], server_weights=server_weights)


class RayWeightUpdater(SenderWeightUpdater):
    """Sends weights to Ray actors that have a ``policy``.

    max_interval  number of pushes that each worker skips between two that it receives
    """

    def __init__(
        self,
        policy_weights: TensorDictBase | None,
        remote_collectors: Sequence[Any],
        max_interval: int = 0,
        *,
        timeout: float = 10.0,
    ):
        super().__init__(weight_update.RayWeightSyncScheme(timeout=timeout), policy_weights, remote_collectors)
        self.max_interval = max_interval
        self._missed = dict.fromkeys(self._ids, max_interval)

    def _sync_weights(self, *, worker_ids: Sequence[Any], server_weights: Any) -> None:
        due = [worker for worker in worker_ids if self._missed[worker] >= self.max_interval]
        # Workers that receive these weights restart their count; the others have missed one more push.
        self._missed |= {worker: 0 if worker in due else self._missed[worker] + 1 for worker in worker_ids}
        super()._sync_weights(worker_ids=due, server_weights=server_weights)


class RPCWeightUpdater(SenderWeightUpdater):
    """Sends weights by torch.distributed.rpc to the objects behind ``collector_rrefs``, each with a ``policy``.
    ``collector_infos`` are their workers.
    """

    def __init__(
        self,
        collector_infos: Sequence[Any],
        collector_class: Any,
        collector_rrefs: Sequence[Any],
        policy_weights: TensorDictBase | None,
        num_workers: int,
        *,
        timeout: float = 10.0,
    ):
        workers = [(info, rref, collector_class) for info, rref in zip(collector_infos, collector_rrefs, strict=True)]
        super().__init__(weight_update.RPCWeightSyncScheme(timeout=timeout), policy_weights, workers[:num_workers])


class DistributedWeightUpdater(SenderWeightUpdater):
    """Sends weights to ranks 1 to ``num_workers`` of a torch.distributed group with this ``store``."""

    def __init__(
        self,
        store: Any,
        policy_weights: TensorDictBase | None,
        num_workers: int,
        sync: bool = True,
        *,
        timeout: float = 10.0,
    ):
        scheme = weight_update.DistributedWeightSyncScheme(sync=sync, timeout=timeout)
        super().__init__(scheme, policy_weights, [(store, rank) for rank in range(1, num_workers + 1)])
