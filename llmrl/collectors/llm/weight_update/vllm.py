"""The documented names for weight updates of vLLM by `llmrl.weight_update.publish`: the updater and the scheme."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llmrl.collectors.weight_updaters import EngineUpdater, Weights
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines.vllm.transfer import NCCL
from llmrl.weight_update import WeightGroups, WeightSender, WeightSyncScheme, publish
from llmrl.weight_update.publish import as_weights, check_engine
from llmrl.weight_update.transports import DirectTransport

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


class vLLMUpdater(EngineUpdater):
    """Pushes weights to the vLLM engine of a collector's policy, or to a given engine. A module is sent in groups, so
    that a sharded one is gathered group by group; adapters are merged in copies.

    master_address, master_port  of the trainer's process, for a broadcast by NCCL; without an address weights go
                                 through the engine's own ``weight_backend``, by default shared memory
    model_metadata               {name: (dtype, shape)} that a push must contain
    vllm_tp_size                 number of the engine's workers, for the broadcast
    engine                       an object with ``update_weights(weights, *, version)``; None: the collector's

    Raises  TypeError   "must implement RLvLLMEngine interface" for another object
            ConfigError for a vllm_tp_size below 1

    ::

        collector = LLMCollector(env, policy=vLLMWrapper(engine), weight_updater=vLLMUpdater())
        collector.weight_updater.init(vLLMUpdater.get_model_metadata(model))
        collector.update_policy_weights_(model)
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Metadata | None = None,
        vllm_tp_size: int | None = None,
        *,
        engine: Any = None,
    ):
        super().__init__()
        if vllm_tp_size is not None and vllm_tp_size < 1:
            raise ConfigError(f"vLLMUpdater: vllm_tp_size must be at least 1: got {vllm_tp_size}.")
        self._broadcast = _broadcast("vLLMUpdater", vllm_tp_size or 1, master_address, master_port)
        self.init(model_metadata, engine=engine)

    def init(self, model_metadata: Metadata | None = None, *, engine: Any = None) -> None:
        """Sets the metadata that a push must match, and the target engine. None leaves the value unchanged."""
        if model_metadata is not None:
            self._metadata = dict(model_metadata)
        if engine is not None:
            self._engine = check_engine(engine, "vLLMUpdater")
            if self._broadcast is not None:
                engine.weight_backend = self._broadcast

    def maybe_init_group(self) -> None:
        """Does nothing: the first push opens the connections."""

    @staticmethod
    def get_model_metadata(model: nn.Module) -> Metadata:
        """{name: (dtype, shape)} of the weights that are pushed, tied weights under their first name."""
        return as_weights(model).metadata

    def register_collector(self, collector: Any) -> None:
        self.collector = collector
        if self._engine is None and (policy := getattr(collector, "policy", None)) is not None:
            self.init(engine=getattr(policy, "engine", policy))

    def _as_weights(self, given: Weights) -> Any:
        return as_weights(given)

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        if self._engine is None:
            raise WeightSyncError(
                "vLLMUpdater: there must be an engine to push to: register a collector, or init(engine=...)."
            )
        super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)


class VLLMWeightSyncScheme(WeightSyncScheme):
    """Settings of the transfer from a trainer to vLLM engines; creates the sender, and a receiver for each engine.

    master_address, master_port  of the trainer's process, for a broadcast by NCCL to one engine; without an address
                                 weights go through each engine's own ``weight_backend``, by default shared memory
    gpus_per_replica             number of workers of one engine
    num_replicas                 number of engines that must have registered before weights are sent
    strategy                     "state_dict" or "tensordict": both accept both forms of weights
    device                       the trainer's GPU, for the broadcast

    >>> from llmrl.testing import FakeEngine, tiny_tokenizer
    >>> engine, model = FakeEngine(["x"], tokenizer=tiny_tokenizer()), nn.Linear(2, 1)
    >>> scheme = VLLMWeightSyncScheme()
    >>> sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    >>> sender.register_worker(0, receiver)
    >>> sender.update_weights(model.state_dict())
    >>> engine.version, sorted(engine.weights)
    (1, ['bias', 'weight'])
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        device: int | str = 0,
    ):
        for name, value in (("gpus_per_replica", gpus_per_replica), ("num_replicas", num_replicas)):
            if value < 1:
                raise ConfigError(f"VLLMWeightSyncScheme: {name} must be at least 1: got {value}.")
        super().__init__(strategy)
        self.weight_backend = _broadcast("VLLMWeightSyncScheme", gpus_per_replica, master_address, master_port)
        if self.weight_backend is not None and num_replicas > 1:
            raise ConfigError(
                f"VLLMWeightSyncScheme: a broadcast from {master_address} reaches the workers of one engine: got "
                f"num_replicas={num_replicas}; give each engine its own weight_backend."
            )
        self.num_replicas, self.device = num_replicas, device

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_transport(self, pipe_or_context: Any) -> EngineTransport:
        return EngineTransport(pipe_or_context)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:  # type: ignore[override]
        """The receiver for ``vllm_engine``. Raises TypeError for an object without an engine's methods."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightReceiver:
    """Publishes the weights that it receives to one engine."""

    takes_groups = True  # `publish` joins them for an engine that does not take groups

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any):
        self.engine = check_engine(vllm_engine, "VLLMWeightReceiver")
        if scheme.weight_backend is not None:
            self.engine.weight_backend = scheme.weight_backend

    @property
    def version(self) -> int:
        return self.engine.version

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Does nothing: the first update opens the connections and describes its weights."""

    def update_weights(self, weights: Mapping[str, Tensor] | WeightGroups | None, *, version: int) -> None:
        publish(weights, self.engine, version)


class EngineTransport(DirectTransport):
    """The connection to a receiver or an engine in this process."""

    def __init__(self, receiver: Any) -> None:
        super().__init__()
        self.registered_with = check_engine(receiver, "VLLMWeightSender")

    def send_weights(self, model_id: str, weights: Any) -> None:
        publish(weights, self.registered_with)


class VLLMWeightSender(WeightSender):
    """Sends the weights of one model to every registered receiver, under one version above those of all engines. A
    module is sent in groups, without packing.
    """

    _metadata: Metadata | None = None

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any = None) -> None:
        """Sets the metadata that an update must match; an engine, if given, is registered as worker 0."""
        self._metadata = dict(model_metadata)
        if vllm_engine is not None:
            self.register_worker(0, self.scheme.create_receiver(vllm_engine))

    @torch.no_grad()
    def update_weights(self, weights: Weights | None = None, *, worker_ids: Collection[Hashable] | None = None) -> None:
        """Sends ``weights``, or those of the registered model; returns when every engine has them.

        Reads   a module (sharded, or with adapters that are merged in copies), a TensorDict, named tensors, or groups
        Raises  WeightSyncError  without weights, with fewer receivers than ``num_replicas``, or if weights of the
                metadata are missing: no engine was updated; also if an engine refuses them
        """
        source = self._model if weights is None else weights
        if source is None:
            raise WeightSyncError("VLLMWeightSender: weights must be given, or a model registered: got neither.")
        if len(self._transports) < self.scheme.num_replicas:
            raise WeightSyncError(
                f"VLLMWeightSender: {self.scheme.num_replicas} engines must have registered: got "
                f"{len(self._transports)}; no engine was updated."
            )
        engines = {worker: transport.registered_with for worker, transport in self._transports.items()}
        # One above the highest version, so that no engine refuses it as too small.
        version = 1 + max((engine.version for engine in engines.values()), default=0)
        broadcasts = self.scheme.weight_backend is not None and torch.cuda.is_available()
        with torch.cuda.device(self.scheme.device) if broadcasts else nullcontext():
            for worker in engines if worker_ids is None else worker_ids:
                publish(source, engines[worker], version, metadata=self._metadata)
        self.version = version


def _broadcast(who: str, num_workers: int, address: str | None, port: int | None) -> NCCL | None:
    if address is None and port is not None:
        raise ConfigError(f"{who}: master_port requires master_address.")
    return None if address is None else NCCL(num_workers, address, port)
