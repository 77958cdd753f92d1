"""The part of llmrl that runs inside vLLM's worker processes: loading weights, scaling logits.

vLLM mixes ``WorkerExtension`` into its worker if ``worker_extension_cls`` names it. For an ``LLM`` in this process that
was built without it, the methods are called with the worker as ``self``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from llmrl.concurrency import parent_watchdog
from llmrl.modules.llm.engines.vllm import compat
from llmrl.weight_update.broadcast import BroadcastBuffer
from llmrl.weight_update.buffers import Buffer, CudaBuffer, SharedBuffer, StoredTensor, checksum

_NUM_COMPARED = 8  # loaded parameters that are compared with what was sent

parent_watchdog.follow()  # at import: this file is the first llmrl code in processes that a server or a core starts
if parent_watchdog.OWNER in os.environ and "vllm.config.vllm" in sys.modules:
    compat.let_a_cpu_report_routes()  # at import too: the process checks its settings again once its worker is up


class WorkerExtension:
    """Methods that llmrl calls in a worker. ``self`` is vLLM's worker; every name begins with ``llmrl_``."""

    def llmrl_prepare(self: Any) -> None:
        """Prepares the worker; called once, when the engine is up."""
        compat.skip_compiled_rank_count()
        _reload_modules()  # reports missing modules now, not at the first update
        reports = getattr(getattr(self.vllm_config, "aux_output_config", None), "enabled", False)
        if reports and not self.vllm_config.use_v2_model_runner:
            _report_routes(self.model_runner, self.vllm_config)

    def llmrl_describe(self: Any) -> dict[str, Any]:
        """`place_of_process`, the "dtype" of weights to send, and "refuses": why none can be loaded, or ""."""
        lora = self.vllm_config.lora_config is not None
        refuses = "it was built with enable_lora, and takes adapters in their place (update_adapter)" if lora else ""
        dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        on_gpu = self.device.type == "cuda"
        place = place_of_process(self.device) if on_gpu else place_of_process() | {"gpu": None, "sees": []}
        return place | {"dtype": dtype, "refuses": refuses}

    def llmrl_load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the model's weights by these, named as in a checkpoint. After an error the weights are a mix of old
        and new ones; a complete set can then be loaded again.
        """
        reload = _Reload(self.model_runner.get_model(), self.vllm_config)
        reload.load(weights)
        reload.finish()

    def llmrl_open_buffer(self: Any, info: dict[str, Any], first_rank: int = 1) -> None:
        """Opens this worker's end of the trainer's buffer.

        info        from `Buffer.connect`
        first_rank  lowest rank of this engine's workers in the broadcast group; the trainer is rank 0
        """
        if "path" in info:
            self._llmrl_buffer = SharedBuffer.open(info["path"], info["size"])
        elif "handle" in info:
            self._llmrl_buffer = CudaBuffer.open(info["gpu"], info["handle"], info["size"])
        else:
            parallel = self.parallel_config
            rank = first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._llmrl_buffer = BroadcastBuffer.open(info["size"], self.device, info["group"], rank)

    def llmrl_start(self: Any) -> None:
        """Begins an update; ends an unfinished one first."""
        if (unfinished := getattr(self, "_llmrl_reload", None)) is not None:
            unfinished.finish()
        self._llmrl_reload = _Reload(self.model_runner.get_model(), self.vllm_config)

    def llmrl_receive(self: Any, stored: list[list[Any]], start: int, stop: int) -> list[str]:
        """Loads the tensors that the trainer wrote into the buffer from ``start`` to ``stop``. If some are damaged,
        loads none and returns their names.
        """
        entries = [StoredTensor(*entry) for entry in stored]
        self._llmrl_buffer.pass_on(start, stop)
        damaged = self._llmrl_buffer.damaged(entries)
        if not damaged:
            self._llmrl_reload.load_stored(entries, self._llmrl_buffer)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # pending copies read memory that the trainer overwrites next
        return damaged

    def llmrl_finish(self: Any) -> dict[str, list[str]]:
        """Ends the update. Returns the faults of the loaded model: {fault: names of parameters}."""
        reload, self._llmrl_reload = self._llmrl_reload, None
        reload.finish()
        return {"was not loaded": reload.not_loaded(), "is not what was sent": reload.differing()}

    def llmrl_set_temperature(self: Any, temperature: float) -> int:
        """Divides the logits of all following requests by ``temperature``, until it is set again. 1: no change.

        Returns the number of output heads that were changed: 0 if this model does not use vLLM's own.
        """
        kind = compat.vllm_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        heads = [module for module in self.model_runner.get_model().modules() if isinstance(module, kind)]
        for head in heads:
            own = vars(head).setdefault("_llmrl_own_scale", head.scale)  # some models scale their logits by themselves
            head.scale = own / temperature
        return len(heads)


def place_of_process(device: Any = None) -> dict[str, Any]:
    """The place of this process: "machine"; "gpu", the UUID of its GPU or None; "sees", the UUIDs of visible GPUs."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if not torch.cuda.is_available():
        return {"machine": machine, "gpu": None, "sees": []}
    seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    number = torch.cuda.current_device() if device is None else device.index
    return {"machine": machine, "gpu": seen[number], "sees": seen}


def _report_routes(runner: Any, vllm_config: Any) -> None:
    """Makes vLLM's older model runner, used on CPUs, report the experts of every token.

    vLLM's own connector captures them, stores them with prefix cache blocks and returns them. As in the newer runner,
    it is called before each step, and then with the positions that the step computed.
    """
    make = compat.vllm_module("vllm.distributed.aux_output_connector.worker").get_aux_output_connector
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


@cache
def _reload_modules() -> tuple[ModuleType, ModuleType]:
    """The vLLM modules that every update needs, looked up once."""
    return compat.vllm_module("vllm.config"), compat.vllm_module("vllm.model_executor.model_loader.reload")


class _Reload:
    """One update of a vLLM model, in several parts."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._model, self._config = model, vllm_config.model_config
        config, self._reload = _reload_modules()
        self._as_current = partial(config.set_current_vllm_config, vllm_config)
        self._attach_kernels: Any = None  # set between the first part and `finish`
        self._sent: dict[str, StoredTensor] = {}
        # Parameters that still have their old value. vLLM inserts ".base_layer." into names for adapters.
        self._unmet = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], buffer: Buffer | None = None) -> None:
        """Loads a part. Copies the tensors in ``buffer`` that vLLM still needs, so that it can be overwritten."""
        try:
            with self._as_current():
                if self._attach_kernels is None:
                    self._attach_kernels = compat.without_expert_kernels(self._model)
                    self._reload.initialize_layerwise_reload(self._model)
                loaded = self._model.load_weights(weights)
            if buffer is not None:
                compat.copy_pending(self._model, buffer.bytes)
        except BaseException:
            self.finish()  # ends the reload of incomplete layers while the buffer still exists
            raise
        self._unmet = set() if loaded is None else self._unmet - loaded

    def load_stored(self, stored: list[StoredTensor], buffer: Buffer) -> None:
        """Loads views of the buffer, without a copy."""
        self.load(((entry.name, buffer.read(entry)) for entry in stored), buffer)
        self._sent |= {entry.name: entry for entry in stored}

    def finish(self) -> None:
        if self._attach_kernels is not None:
            try:
                with self._as_current():
                    self._reload.finalize_layerwise_reload(self._model, self._config)
            finally:
                self._attach_kernels()
                self._attach_kernels = None
            compat.repack_tied(self._model)

    def not_loaded(self) -> list[str]:
        """The parameters of vLLM's model that no sent weight was loaded into."""
        return sorted(self._unmet) if self._config.quantization is None else []

    def differing(self) -> list[str]:
        """Checks a few parameters that vLLM stores as sent (vectors); returns those that differ from what was sent."""
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
