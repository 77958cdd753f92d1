"""What runs inside vLLM's worker processes: loading weights, and the temperature under which prompts are scored.

vLLM mixes ``WorkerExtension`` into its worker when it is named as ``worker_extension_cls``; in this process its methods
are called with the worker as ``self`` instead, so an ``LLM`` that somebody else built has them too. Nothing here knows
of versions, requests or the trainer: that is the engine's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor

from llmrl.concurrency import parent_watchdog
from llmrl.modules.llm.engines.vllm import shared_memory
from llmrl.modules.llm.engines.vllm.reload_patches import repack_tied, set_kernels_aside
from llmrl.modules.llm.engines.vllm.shared_memory_buffer import Placed
from llmrl.optional import require

__all__ = ["EXTENSION", "WorkerExtension"]

EXTENSION = f"{__name__}.WorkerExtension"

parent_watchdog.follow()  # here, because importing this file is the first that vLLM lets us do in a process of its own


class WorkerExtension:
    """The calls that llmrl makes into a worker. ``self`` is vLLM's worker; every name begins with ``llmrl_``."""

    def llmrl_prepare(self: Any) -> None:
        """On a CPU: takes the compiler out of the first log-prob. vLLM counts the rank of every sampled token in a
        kernel compiled on first use (6 to 40 s); nothing here reads ranks.
        """
        current_platform = _vllm("vllm.platforms").current_platform
        sampler = _vllm("vllm.v1.sample.sampler")
        count = getattr(sampler, "batched_count_greater_than", None)
        plain = getattr(count, "_torchdynamo_orig_callable", None)
        if current_platform.is_cpu() and plain is not None:
            sampler.batched_count_greater_than = plain

    def llmrl_why_not_loadable(self: Any) -> str:
        """What keeps this model from being given new weights; empty where nothing does."""
        if self.vllm_config.lora_config is not None:
            return "it was built with enable_lora, and takes adapters in their place (update_adapter)"
        return ""

    def llmrl_load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the model's weights by these, named as in a checkpoint. After an error a whole set can be loaded
        again, and until then the weights are neither the old nor the new ones.
        """
        model = self.model_runner.get_model()
        put_back = set_kernels_aside(model)
        try:
            self.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            self.reload_weights(weights_iterator=iter(()))  # puts back the layers that still wait for theirs
            raise
        finally:
            put_back()
        repack_tied(model)

    def llmrl_open_transfer(self: Any, backend: str, init_info: dict[str, Any]) -> None:
        """Makes ``backend``, a name that vLLM's factory knows or ours, the way in which this worker takes weights."""
        if backend == shared_memory.BACKEND:
            shared_memory.register()
        current = self.weight_transfer_engine
        if current is None or current.config.backend != backend:
            if current is not None:
                current.shutdown()
            config = _vllm("vllm.config.weight_transfer").WeightTransferConfig(backend=backend)
            factory = _vllm("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
            model = self.model_runner.get_model()
            worker = getattr(self, "worker", self)  # in this process ``self`` is a wrapper around it
            worker.weight_transfer_engine = factory.create_engine(config, self.vllm_config, self.device, model)
        self.init_weight_transfer_engine(init_info)

    def llmrl_start(self: Any) -> None:
        """Begins an update; one that broke off is ended first."""
        if self._weight_update_active:
            self.finish_weight_update()
        self.start_weight_update()

    def llmrl_receive(self: Any, placed: list[list[Any]]) -> list[str]:
        """Loads what the trainer put into the block. Where something is damaged, its names: nothing is loaded then."""
        entries = [Placed(*entry) for entry in placed]
        damaged = self.weight_transfer_engine.damaged(entries)
        if not damaged:
            self.update_weights({"placed": entries})
        return damaged

    def llmrl_finish(self: Any) -> dict[str, list[str]]:
        """Ends the update. What is wrong with the loaded model: {what: names of parameters}."""
        self.finish_weight_update()
        transfer = self.weight_transfer_engine
        return {"was not loaded": transfer.not_loaded(), "is not what was sent": transfer.differing()}

    def llmrl_set_temperature(self: Any, temperature: float) -> int:
        """Divides the logits of everything that follows by ``temperature``, until it is set again. 1: as they were.

        vLLM's log-probs of a prompt are of the plain logits, whatever the request's temperature. Returns how many
        output heads were reached: 0 means that this model does not go through vLLM's own.
        """
        kind = _vllm("vllm.model_executor.layers.logits_processor").LogitsProcessor
        heads = [module for module in self.model_runner.get_model().modules() if isinstance(module, kind)]
        for head in heads:
            own = vars(head).setdefault("_llmrl_own_scale", head.scale)  # some models scale their logits by themselves
            head.scale = own / temperature
        return len(heads)


def _vllm(module: str) -> ModuleType:
    return require(module, extra="vllm", used_by="VLLMEngine")
