"""The part of llmrl that runs inside vLLM's worker processes: loading weights, scaling logits.

vLLM mixes ``WorkerExtension`` into its worker when it is named as ``worker_extension_cls``; in this process its methods
are called with the worker as ``self`` instead, so an ``LLM`` that was built elsewhere has them too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from llmrl.concurrency import parent_watchdog
from llmrl.modules.llm.engines.vllm.broadcast import BroadcastBuffer
from llmrl.modules.llm.engines.vllm.compat import (
    copy_pending,
    let_a_cpu_report_routes,
    repack_tied,
    skip_compiled_rank_count,
    vllm_module,
    without_expert_kernels,
)
from llmrl.modules.llm.engines.vllm.shared_memory import Buffer, CudaBuffer, SharedBuffer, StoredTensor, checksum

__all__ = ["WorkerExtension"]

BACKEND = "llmrl"  # the name of our transfer in vLLM's factory
_NUM_COMPARED = 8  # loaded parameters that are compared with what was sent

parent_watchdog.follow()  # here, because vLLM runs nothing of ours in its own process before it imports this file
if parent_watchdog.OWNER in os.environ and "vllm.config.vllm" in sys.modules:
    let_a_cpu_report_routes()  # likewise: the process checks its settings once more, when its worker is up


class WorkerExtension:
    """The calls that llmrl makes into a worker. ``self`` is vLLM's worker; every name begins with ``llmrl_``."""

    def llmrl_prepare(self: Any) -> None:
        """Called once, when the engine is up."""
        skip_compiled_rank_count()
        reports = getattr(getattr(self.vllm_config, "aux_output_config", None), "enabled", False)
        if reports and not self.vllm_config.use_v2_model_runner:
            _report_routes(self.model_runner, self.vllm_config)

    def llmrl_describe(self: Any) -> dict[str, Any]:
        """`place_of_process`; the "dtype" that weights are to come in; "refuses", why none can be loaded, or ""."""
        lora = self.vllm_config.lora_config is not None
        refuses = "it was built with enable_lora, and takes adapters in their place (update_adapter)" if lora else ""
        dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        on_gpu = self.device.type == "cuda"
        place = place_of_process(self.device) if on_gpu else place_of_process() | {"gpu": None, "sees": []}
        return place | {"dtype": dtype, "refuses": refuses}

    def llmrl_load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the model's weights by these, named as in a checkpoint. After an error the weights are neither the
        old nor the new ones, and a complete set can be loaded again.
        """
        model = self.model_runner.get_model()
        attach_kernels = without_expert_kernels(model)
        try:
            self.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            self.reload_weights(weights_iterator=iter(()))  # ends the reload of layers that are incomplete
            raise
        finally:
            attach_kernels()
        repack_tied(model)

    def llmrl_open_transfer(self: Any, backend: str, init_info: dict[str, Any], first_rank: int = 1) -> None:
        """Makes ``backend``, a name of ours or of vLLM's factory, the transfer by which this worker takes weights.

        first_rank  of this engine's workers in the group that weights are broadcast to: the trainer is 0
        """
        factory = vllm_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        if backend == BACKEND:
            try:
                factory.register_engine(backend, _transfer_class())
            except ValueError as error:
                if "already registered" not in str(error):
                    raise
        current = self.weight_transfer_engine
        if current is None or current.config.backend != backend:
            if current is not None:
                current.shutdown()
            config = vllm_module("vllm.config.weight_transfer").WeightTransferConfig(backend=backend)
            model = self.model_runner.get_model()
            worker = getattr(self, "worker", self)  # in this process ``self`` is a wrapper around it
            worker.weight_transfer_engine = factory.create_engine(config, self.vllm_config, self.device, model)
        if backend == BACKEND:
            init_info = {**init_info, "first_rank": first_rank}
        self.init_weight_transfer_engine(init_info)

    def llmrl_start(self: Any) -> None:
        """Begins an update; an unfinished one is ended first."""
        if self._weight_update_active:
            self.finish_weight_update()
        self.start_weight_update()

    def llmrl_receive(self: Any, stored: list[list[Any]], start: int, stop: int) -> list[str]:
        """Loads what the trainer wrote into the buffer from ``start`` to ``stop``, or nothing if some of it is
        damaged; then its names.
        """
        entries = [StoredTensor(*entry) for entry in stored]
        buffer = self.weight_transfer_engine.buffer
        buffer.pass_on(start, stop)
        damaged = [entry.name for entry in entries if not buffer.is_intact(entry)]
        if not damaged:
            self.update_weights({"stored": entries})
        return damaged

    def llmrl_finish(self: Any) -> dict[str, list[str]]:
        """Ends the update. What is wrong with the loaded model: {what: names of parameters}."""
        self.finish_weight_update()
        reload = self.weight_transfer_engine.reload
        return {"was not loaded": reload.not_loaded(), "is not what was sent": reload.differing()}

    def llmrl_set_temperature(self: Any, temperature: float) -> int:
        """Divides the logits of everything that follows by ``temperature``, until it is set again. 1: as they were.

        Returns the number of output heads that were reached: 0 if this model does not use vLLM's own.
        """
        kind = vllm_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        heads = [module for module in self.model_runner.get_model().modules() if isinstance(module, kind)]
        for head in heads:
            own = vars(head).setdefault("_llmrl_own_scale", head.scale)  # some models scale their logits by themselves
            head.scale = own / temperature
        return len(heads)


def place_of_process(device: Any = None) -> dict[str, Any]:
    """The place of this process: "machine", "gpu", the UUID of its own or None, and the UUIDs that it "sees"."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if not torch.cuda.is_available():
        return {"machine": machine, "gpu": None, "sees": []}
    seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    number = torch.cuda.current_device() if device is None else device.index
    return {"machine": machine, "gpu": seen[number], "sees": seen}


def _report_routes(runner: Any, vllm_config: Any) -> None:
    """Makes vLLM's older model runner, that of a CPU, report the experts of every token.

    What vLLM has for it (capturing, blocks of the prefix cache, the way to the answer) is used as its newer runner uses
    it: told of each step before it, and of the positions that it has computed.
    """
    make = vllm_module("vllm.distributed.aux_output_connector.worker").get_aux_output_connector
    connector = make(runner.get_model(), vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens, shutdown = runner.execute_model, runner.sample_tokens, runner.shutdown

    def execute(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *arguments, **options)

    def sample(*arguments: Any, **options: Any) -> Any:
        batch, count = runner.input_batch, runner.input_batch.num_reqs
        step = SimpleNamespace(
            req_ids=list(batch.req_ids),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
        )
        pending = connector.prepare_output(step)
        output = sample_tokens(*arguments, **options)
        if pending is not None:
            num_sampled = numpy.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, numpy.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def close() -> None:
        connector.close()
        shutdown()

    runner.execute_model, runner.sample_tokens, runner.shutdown = execute, sample, close


class _Reload:
    """One update of a vLLM model, loaded part by part out of a shared buffer.

    Tensors are views of the buffer, so nothing is held twice; only what vLLM still needs is copied before the trainer
    writes there again.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._reload = vllm_module("vllm.model_executor.model_loader.reload")
        self._attach_kernels: Any = None  # set by the first part
        self._sent: dict[str, StoredTensor] = {}
        self._unmet = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}

    @torch.no_grad()
    def load(self, stored: list[StoredTensor], buffer: Buffer) -> None:
        if self._attach_kernels is None:
            self._attach_kernels = without_expert_kernels(self._model)
            self._reload.initialize_layerwise_reload(self._model)
        try:
            loaded = self._model.load_weights((entry.name, buffer.read(entry)) for entry in stored)
            copy_pending(self._model, buffer.bytes)
        except BaseException:
            self._finalize()  # ends the reload of layers that are incomplete
            raise
        self._sent |= {entry.name: entry for entry in stored}
        self._unmet = set() if loaded is None else self._unmet - loaded

    def finish(self) -> None:
        if self._attach_kernels is not None:
            self._finalize()
            repack_tied(self._model)

    def _finalize(self) -> None:
        try:
            self._reload.finalize_layerwise_reload(self._model, self._config)
        finally:
            self._attach_kernels()

    def not_loaded(self) -> list[str]:
        """The parameters of vLLM's model that nothing sent has reached."""
        return sorted(self._unmet) if self._config.quantization is None else []

    def differing(self) -> list[str]:
        """Of a few parameters that vLLM keeps as they are sent (vectors), those that are now something else."""
        kept = [
            (entry, parameter)
            for name, parameter in self._model.named_parameters()
            if (entry := self._sent.get(name)) is not None
            and parameter.ndim == 1
            and list(parameter.shape) == list(entry.shape)
            and str(parameter.dtype) == f"torch.{entry.dtype}"
        ]
        compared = kept[:: max(len(kept) // _NUM_COMPARED, 1)]
        return [entry.name for entry, parameter in compared if checksum(parameter) != entry.checksum]


@cache
def _transfer_class() -> type:
    """The worker's half of the transfer, a ``WeightTransferEngine`` for vLLM's factory."""
    base = vllm_module("vllm.distributed.weight_transfer.base")

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        info: dict[str, Any]  # of a buffer's ``connect``
        first_rank: int = 1

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        stored: list[StoredTensor]

    class BufferWeightTransferEngine(base.WeightTransferEngine):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            info = init_info.info
            if "path" in info:
                self.buffer = SharedBuffer.open(info["path"], info["size"])
            elif "handle" in info:
                self.buffer = CudaBuffer.open(info["gpu"], info["handle"], info["size"])
            else:
                parallel = self.parallel_config
                replica = parallel.data_parallel_index * parallel.world_size
                rank = init_info.first_rank + replica + parallel.rank
                self.buffer = BroadcastBuffer.open(info["size"], self.device, info["group"], rank)

        def start_weight_update(self) -> None:
            self.reload = _Reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.reload.load(update_info.stored, self.buffer)

        def finish_weight_update(self) -> None:
            self.reload.finish()

        def shutdown(self) -> None:
            self.buffer = None

    return BufferWeightTransferEngine
