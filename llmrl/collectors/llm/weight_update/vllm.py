"""``vLLMUpdater``: what a collector over a vLLM engine calls when the trainer has new weights.

The engine does the work (`VLLMEngine.update_weights`). This says which engine, what a complete set of weights is, and
what is sent of a module: groups, so that a sharded one is gathered piece by piece, or the merged weights of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.collectors.weight_updaters import VersionedCollector, WeightUpdaterBase
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines.vllm.nccl_transfer import NCCL
from llmrl.weight_update import WeightGroups, WeightPublisher, merged_weights, weight_groups

__all__ = ["EngineInterfaceError", "as_weights", "check_engine", "vLLMUpdater"]

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


class EngineInterfaceError(ConfigError, TypeError):
    """What was given as an engine is none."""


class vLLMUpdater(WeightUpdaterBase):
    """Pushes weights to the vLLM engine of a collector's policy, or to the one given.

    master_address, master_port  where the trainer's GPU is found, for a broadcast by NCCL; without an address weights
                                 go as the engine is set to take them, through shared memory by default
    model_metadata               {name: (dtype, shape)}: what is pushed must be among it
    vllm_tp_size                 workers of the engine, for the broadcast
    engine                       anything with ``update_weights(weights, *, version)``; None: the collector's

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
        self._broadcast = None
        if master_address is not None:
            self._broadcast = NCCL(vllm_tp_size or 1, master_address, master_port)
        elif master_port is not None:
            raise ConfigError("vLLMUpdater: master_port says nothing without master_address: got it alone.")
        self._metadata: Metadata | None = None
        self._engine: Any = None
        self.init(model_metadata, engine=engine)

    def init(self, model_metadata: Metadata | None = None, *, engine: Any = None) -> None:
        """Says what a set of weights is, and to which engine it goes. None: as it was."""
        if model_metadata is not None:
            self._metadata = dict(model_metadata)
        if engine is not None:
            self._engine = check_engine(engine, "vLLMUpdater")
            if self._broadcast is not None:
                engine.weight_backend = self._broadcast

    def maybe_init_group(self) -> None:
        """Nothing to be done: connections are opened by the first push."""

    @staticmethod
    def get_model_metadata(model: nn.Module) -> Metadata:
        """{name: (dtype, shape)} of what is pushed of a model, tied weights under their first name."""
        return as_weights(model).metadata

    def register_collector(self, collector: VersionedCollector) -> None:
        super().register_collector(collector)
        if self._engine is None and (policy := getattr(collector, "policy", None)) is not None:
            self.init(engine=getattr(policy, "engine", policy))

    def push_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | WeightGroups | None = None,
        worker_ids: Any | Sequence[Any] | None = None,
    ) -> None:
        """Sends weights, whole or not at all, then moves the collector's policy version.

        Reads   a module (sharded, or with adapters that are merged in copies), a TensorDict, named tensors, or groups
        Raises  WeightSyncError where there is no engine yet, or they are not those of the metadata
        """
        super().push_weights(as_weights(policy_or_weights), worker_ids)

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        del worker_id  # there is one engine
        if self._engine is None:
            raise WeightSyncError(
                "vLLMUpdater: there must be an engine to push to: register a collector, or init(engine=...)."
            )
        if server_weights is not None and self._metadata is not None:
            self._check(server_weights)
        WeightPublisher([self._engine]).publish(server_weights)

    def _check(self, weights: Mapping[str, Tensor] | WeightGroups) -> None:
        found = weights.metadata if isinstance(weights, WeightGroups) else _metadata(weights)
        for name, what in found.items():
            if self._metadata.get(name, what) != what:
                raise WeightSyncError(f"vLLMUpdater: {name} must be {self._metadata[name]}: got {what}.")
        if missing := [name for name in self._metadata if name not in found]:
            raise WeightSyncError(f"vLLMUpdater: {missing[0]} must be pushed too: got {len(found)} others.")


def as_weights(given: Any) -> Any:
    """What is sent of a module; anything else as it is."""
    if not isinstance(given, nn.Module):
        return given
    return merged_weights(given) if hasattr(given, "get_base_model") else weight_groups(given)


def check_engine(engine: Any, who: str) -> Any:
    """The engine. Raises TypeError for what has not its methods."""
    if not callable(getattr(engine, "update_weights", None)) or not hasattr(engine, "version"):
        raise EngineInterfaceError(
            f"{who}: an engine must implement RLvLLMEngine interface (update_weights(weights, *, version), version): "
            f"got {type(engine).__name__}."
        )
    return engine


def _metadata(weights: Mapping[str, Tensor]) -> Metadata:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
