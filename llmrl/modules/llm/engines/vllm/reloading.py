"""What vLLM's reload of weights needs beside it: tied heads, and tensors that it has not finished with.

Both run in the worker, on vLLM's model, after vLLM's own functions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from llmrl.optional import require

__all__ = ["copy_waiting", "repack_tied"]


def repack_tied(model: nn.Module) -> None:
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


def copy_waiting(model: nn.Module, memory: Tensor) -> None:
    """Gives vLLM copies of the tensors inside ``memory`` that it still holds on to, so that it can be written again.

    A reload keeps what it is given until a layer has all of its parameters: the query projection until key and value
    have come, a padded embedding until the end.
    """
    get_info = require("vllm.model_executor.model_loader.reload.layerwise", extra="vllm", used_by="VLLMEngine")
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.itemsize

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if start <= value.data_ptr() < end else value
        if isinstance(value, tuple):
            return tuple(copied(part) for part in value)
        if isinstance(value, dict):
            return {key: copied(part) for key, part in value.items()}
        return value

    for module in model.modules():
        for _, arguments in get_info.get_layerwise_info(module).loaded_weights:
            for name, value in arguments.arguments.items():
                arguments.arguments[name] = copied(value)
