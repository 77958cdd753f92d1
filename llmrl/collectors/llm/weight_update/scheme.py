"""``VLLMWeightSyncScheme``: the sender-and-receiver form of an update of vLLM engines. Adapters over a publisher.

The receiver stands in the process that talks to the engine, which may be anywhere: in that process, in one of its own,
or behind a URL. How the weights get there is the engine's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.collectors.llm.weight_update.vllm import as_weights, check_engine
from llmrl.collectors.weight_updaters import named_tensors
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines.vllm.nccl_transfer import NCCL
from llmrl.weight_update import WeightGroups, WeightPublisher

__all__ = ["VLLMWeightReceiver", "VLLMWeightSender", "VLLMWeightSyncScheme"]

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
Weights = nn.Module | TensorDictBase | Mapping[str, Tensor] | WeightGroups


class VLLMWeightSyncScheme:
    """How weights get from a trainer into vLLM engines.

    master_address, master_port  where the trainer's GPU is found, for a broadcast by NCCL, to one engine; without an
                                 address as each engine is set to take them, through shared memory by default
    gpus_per_replica             workers of one engine
    num_replicas                 engines that must have registered before weights are sent
    strategy                     "state_dict" or "tensordict": both names say the same here, whatever is given is taken
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
        if strategy not in ("tensordict", "state_dict"):
            raise ConfigError(f"VLLMWeightSyncScheme: strategy is 'tensordict' or 'state_dict': got {strategy!r}.")
        if master_address is None and master_port is not None:
            raise ConfigError("VLLMWeightSyncScheme: master_port says nothing without master_address: got it alone.")
        if master_address is not None and num_replicas > 1:
            raise ConfigError(
                f"VLLMWeightSyncScheme: a broadcast from {master_address} reaches the workers of one engine: got "
                f"num_replicas={num_replicas}; give each engine a weight_backend of its own."
            )
        self.num_replicas, self.strategy, self.device = num_replicas, strategy, device
        self.weight_backend = None if master_address is None else NCCL(gpus_per_replica, master_address, master_port)

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """The receiver in front of ``vllm_engine``. Raises TypeError for what is no engine."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightReceiver:
    """Gives what it is sent to one engine."""

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any):
        self.engine = check_engine(vllm_engine, "VLLMWeightReceiver")
        if scheme.weight_backend is not None:
            self.engine.weight_backend = scheme.weight_backend

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def takes_groups(self) -> bool:
        return getattr(self.engine, "takes_groups", False)

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        return getattr(self.engine, "unsaved_buffers", frozenset())

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Nothing to be done: connections are opened by the first update, which says what it sends."""

    def update_weights(self, weights: Mapping[str, Tensor] | WeightGroups | None, *, version: int) -> None:
        """All of them, or an error and the version that was."""
        self.engine.update_weights(weights, version=version)


class VLLMWeightSender:
    """Sends the weights of one model to every receiver that registered, all under one version."""

    def __init__(self, scheme: VLLMWeightSyncScheme):
        self._scheme = scheme
        self._receivers: dict[int, VLLMWeightReceiver] = {}
        self._model: nn.Module | None = None
        self._metadata: Metadata | None = None
        self.version = 0

    def register_model(self, model: nn.Module) -> None:
        """Whose weights are sent when none are given."""
        self._model = model

    def register_worker(self, worker_idx: int, receiver: VLLMWeightReceiver) -> None:
        """Who gets them, by a number of its own: once more with that number replaces."""
        self._receivers[worker_idx] = check_engine(receiver, "VLLMWeightSender")

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any = None) -> None:
        """Says what a set of weights is, and, where an engine is given, that it gets them as worker 0."""
        self._metadata = dict(model_metadata)
        if vllm_engine is not None:
            self.register_worker(0, self._scheme.create_receiver(vllm_engine))

    @torch.no_grad()
    def update_weights(self, weights: Weights | None = None) -> None:
        """Sends ``weights``, or those of the registered model; returns when every engine has them.

        Reads   a module (sharded, or with adapters that are merged in copies), a TensorDict, named tensors, or groups
        Raises  WeightSyncError  without weights, with fewer receivers than ``num_replicas``, or where they are not
                those of the metadata: no engine was updated; and where one refuses
        """
        source = self._model if weights is None else weights
        if source is None:
            raise WeightSyncError("VLLMWeightSender: weights must be given, or a model registered: got neither.")
        if len(self._receivers) < self._scheme.num_replicas:
            raise WeightSyncError(
                f"VLLMWeightSender: {self._scheme.num_replicas} engines must have registered: got "
                f"{len(self._receivers)}; no engine was updated."
            )
        publisher = WeightPublisher(list(self._receivers.values()), metadata=self._metadata)
        publisher.version = self.version = max(self.version, publisher.version)
        broadcasts = self._scheme.weight_backend is not None and torch.cuda.is_available()
        with torch.cuda.device(self._scheme.device) if broadcasts else nullcontext():
            self.version = publisher.publish(named_tensors(as_weights(source)))
