"""What runs inside vLLM's worker processes: loading weights, and the temperature under which prompts are scored.

vLLM mixes ``WorkerExtension`` into its worker when it is named as ``worker_extension_cls``; in this process its methods
are called with the worker as ``self`` instead, so an ``LLM`` that somebody else built has them too. Nothing here knows
of versions, requests or the trainer: that is the engine's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from llmrl.optional import require

__all__ = ["EXTENSION", "WorkerExtension"]

EXTENSION = f"{__name__}.WorkerExtension"


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
        """What keeps this model from being given new weights; empty where nothing does.

        On a CPU vLLM's reload (0.32) leaves the experts of a mixture wrong, even with the weights that they had.
        """
        methods = [getattr(module, "quant_method", None) for module in self.model_runner.get_model().modules()]
        experts = any("MoE" in type(method).__name__ for method in methods)
        on_cpu = _vllm("vllm.platforms").current_platform.is_cpu()
        return "vLLM reloads the experts of a mixture wrongly on a CPU" if on_cpu and experts else ""

    def llmrl_load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the model's weights by these, named as in a checkpoint. After an error a whole set can be loaded
        again, and until then the weights are neither the old nor the new ones.
        """
        try:
            self.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            self.reload_weights(weights_iterator=iter(()))  # puts back the layers that still wait for theirs
            raise
        _repack_tied(self.model_runner.get_model())

    def llmrl_load_file(self: Any, path: str) -> None:
        """The same from a safetensors file, which stays."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            WorkerExtension.llmrl_load_weights(self, ((name, file.get_tensor(name)) for name in file.keys()))

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


def _repack_tied(model: nn.Module) -> None:
    """Packs the weight of every tied output head anew.

    On a CPU vLLM multiplies with a packed copy of each weight. A reload packs what was sent, and a tied head is never
    sent: it would go on with the copy of the old embedding while everything else is new.
    """
    packed: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(module, "cpu_linear"):
            packed.setdefault(weight.data_ptr(), []).append(module)
    for modules in packed.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)
