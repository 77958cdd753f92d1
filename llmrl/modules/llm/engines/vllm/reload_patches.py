"""What vLLM's reload of weights needs beside it: tied heads, packed experts, and tensors that it has not finished with.

All of it runs in the worker, on vLLM's model, before or after vLLM's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from llmrl.optional import require

__all__ = ["copy_waiting", "repack_tied", "set_kernels_aside"]


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


def set_kernels_aside(model: nn.Module) -> Callable[[], None]:
    """Takes the kernels of experts away on a CPU, so that a reload packs the weights of experts; returns what puts them
    back afterwards.

    vLLM (0.32) packs the experts of a mixture while it builds their kernel. Where it finds one it copies what was
    loaded as it came, as graphs on a GPU want it, and the kernel would read unpacked weights as packed ones.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [
        (method, method.moe_kernel, method.moe_quant_config)
        for method in methods
        if getattr(method, "moe_kernel", None) is not None
    ]
    if next(model.parameters()).device.type != "cpu":
        kernels = []
    for method, _, _ in kernels:
        method.moe_kernel = None

    def put_back() -> None:  # it looks into the layer's own memory, which holds the new weights by then
        for method, kernel, settings in kernels:
            method.moe_kernel, method.moe_quant_config = kernel, settings

    return put_back


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
