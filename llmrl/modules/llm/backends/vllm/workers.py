"""Documented ways to create a vLLM engine: on chosen devices, in a Ray actor, with a worker for broadcast weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.backends.vllm.ray_engine import RayEngine
from llmrl.modules.llm.engines.vllm.engine import VLLMEngine
from llmrl.modules.llm.engines.vllm.worker import WorkerExtension
from llmrl.weight_update.broadcast import stateless_init_process_group
from llmrl.weight_update.buffers import checksum


class LLMOnDevice(VLLMEngine):
    """A `VLLMEngine` on some of this machine's GPUs, given as ``devices``, with one tensor-parallel rank on each."""


def make_vllm_worker(
    *,
    model_name: str,
    devices: Sequence[torch.device | int] | None = None,
    num_devices: int | None = None,
    make_ray_worker: bool = True,
    enforce_eager: bool = False,
    enable_fp32_output: bool = False,
    **settings: Any,
) -> VLLMEngine | RayEngine:
    """Creates a vLLM engine for the model ``model_name``, to be passed to `vLLMWrapper`.

    devices             the GPUs to use; num_devices: only their number. Not both
    make_ray_worker     True: in a Ray actor, whose GPUs Ray assigns; False: on this machine
    enforce_eager       True: no graphs, no compilation
    enable_fp32_output  logits in float32. vLLM has no switch for only the head, so the whole model computes in float32
    settings            keyword arguments of `VLLMEngine`

    Raises  ConfigError  for devices and num_devices together
    """
    if devices is not None and num_devices is not None:
        raise ConfigError("make_vllm_worker: devices and num_devices exclude each other: got both.")
    if num_devices is not None and num_devices < 1:
        raise ConfigError(f"make_vllm_worker: num_devices must be at least 1: got {num_devices}.")
    numbers = None if devices is None else [_number(device) for device in devices]
    if enforce_eager:
        settings = {"enforce_eager": True} | settings
    if enable_fp32_output:
        if settings.get("dtype", "float32") not in ("float32", torch.float32):
            raise ConfigError(f"make_vllm_worker: enable_fp32_output needs dtype float32: got {settings['dtype']!r}.")
        settings["dtype"] = "float32"
    count = num_devices if numbers is None else len(numbers)
    if make_ray_worker:
        return RayEngine(model_name, num_gpus=count, **settings)
    if count is not None and numbers is None:
        settings = {"own_process": True, "tensor_parallel_size": count} | settings
    return LLMOnDevice(model_name, devices=numbers, **settings)


class vLLMWorker(WorkerExtension):
    """Worker methods for a trainer that sends weights itself, tensor by tensor over a process group.

    For use as ``worker_extension_cls``. An engine's own ``update_weights`` needs none of this, and is faster.
    """

    def init_weight_update_group(
        self: Any, master_address: str, master_port: int, rank_offset: int, world_size: int
    ) -> None:
        """Joins the group, after the ``rank_offset`` ranks of the trainer."""
        rank = rank_offset + self.rank
        self._llmrl_group = stateless_init_process_group(master_address, master_port, rank, world_size, self.device)
        self._llmrl_received = {}
        self._llmrl_before = vLLMWorker._checksums(self)

    def update_weight(self: Any, name: str, dtype_name: str, shape: Sequence[int]) -> None:
        """Receives a broadcast tensor from rank 0, and stores it for `apply_weights`."""
        if getattr(self, "_llmrl_group", None) is None:
            raise WeightSyncError("vLLMWorker: init_weight_update_group must come before update_weight: it did not.")
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        weight = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._llmrl_group.broadcast(weight, src=0)
        self._llmrl_received[name] = weight

    def apply_weights(self: Any) -> None:
        """Loads and releases the stored tensors, which must be a complete set."""
        received, self._llmrl_received = self._llmrl_received, {}
        WorkerExtension.llmrl_load_weights(self, received.items())
        # As after vLLM's own reload, for engines other than `VLLMEngine`: image embeddings were computed with the old
        # weights, and the memory of adapters is lost in a level-2 sleep.
        self.model_runner.reset_encoder_cache()
        if hasattr(self.model_runner, "reset_lora_state"):  # older versions have none
            self.model_runner.reset_lora_state()

    def check_weights_changed(self: Any) -> bool:
        """True if any parameter has changed since `init_weight_update_group`."""
        return vLLMWorker._checksums(self) != self._llmrl_before

    def _checksums(self: Any) -> dict[str, int]:
        return {name: checksum(value) for name, value in self.model_runner.get_model().named_parameters()}


def _number(device: torch.device | int) -> int:
    number = device if isinstance(device, int) else torch.device(device).index
    if number is None:
        raise ConfigError(f"make_vllm_worker: a device must be a GPU with a number: got {device}.")
    return number
