"""Weights of a model with adapters (peft) for an engine: all weights with the adapters merged, or the adapters alone.

Neither changes the model: layers are merged in copies, one at a time.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmrl.errors import UnsupportedError
from llmrl.optional import require
from llmrl.weight_update.groups import LazyWeight, WeightGroups, whole

ADAPTER_FILE = "adapter_model.safetensors"


def merged_weights(model: nn.Module, *, max_bytes: int = 1 << 28, only_changed: bool = False) -> WeightGroups:
    """The weights of a ``peft.PeftModel`` with its active adapters merged, under the names of the base model; with
    ``only_changed``, those alone that differ from the base model's.

    A layer is copied and merged when its group is requested, by peft's own code (so that DoRA and other variants are
    right too), and the copy is freed with the group. The model itself does not change. Disabled adapters
    (``disable_adapter``) are not merged. 4-bit weights (bitsandbytes) are dequantized to the model's compute dtype.

    Raises  UnsupportedError for a tied weight that an adapter changes differently in its places: it would no longer be
            tied
    """
    layer_type = _peft("peft.tuners.tuners_utils").BaseTunerLayer
    saved_type = _peft("peft.utils.other").ModulesToSaveWrapper
    inside = model.get_base_model()
    layers = {name: module for name, module in inside.named_modules() if isinstance(module, layer_type)}
    replaced = {name: module for name, module in inside.named_modules() if isinstance(module, saved_type)}
    weights: dict[str, LazyWeight] = {}
    homes: dict[int, list[tuple[str, Any]]] = {}  # id of a parameter -> its names, each with what takes its place
    values = inside.state_dict(keep_vars=True)
    packed = {name for name, value in values.items() if hasattr(value, "quant_state")}
    for home, value in values.items():
        # Every entry is one of four kinds: the base of a layer with an adapter, a module that is trained as a whole
        # (modules_to_save), an adapter's own weight, or untouched by peft. peft renames the first two kinds.
        if home.partition(".weight.")[0] + ".weight" in packed:
            continue  # quantization constants of a 4-bit weight
        name, instead = home, None
        layer_name, in_layer, leaf = name.partition(".base_layer.")
        saved_name, in_saved, saved_leaf = name.partition(".original_module.")
        if in_layer and layer_name in layers:
            name, layer = f"{layer_name}.{leaf}", layers[layer_name]
            if _is_active(layer) and (leaf == "weight" or any(getattr(layer, "lora_bias", {}).values())):
                instead = layer
            make = partial(whole, value) if instead is None else partial(_merged, layer, leaf)
        elif in_saved and saved_name in replaced:
            name, wrapper = f"{saved_name}.{saved_leaf}", replaced[saved_name]
            own = value
            if wrapper.active_adapters and not wrapper.disable_adapters:
                instead = own = wrapper.modules_to_save[wrapper.active_adapters[0]].get_parameter(saved_leaf)
            make = partial(_cast, own, value.dtype)
        elif any(name.startswith(f"{prefix}.") for prefix in (*layers, *replaced)):
            continue  # an adapter's own weight: part of the layer that it is merged into
        else:
            make = partial(whole, value)
        # A tied weight has several entries and is sent once, under its first name.
        others = homes.setdefault(id(value), [])
        others.append((name, instead))
        if len(others) > 1:
            if others[0][1] is not instead:
                raise UnsupportedError(
                    f"merged_weights: {others[0][0]} and {name} are one tied weight, and an adapter changes it in one "
                    "of the two places: it cannot be merged; leave that layer out of the adapter, untie it, or train "
                    "both as one (peft's ensure_weight_tying)."
                )
            continue
        if only_changed and instead is None:
            continue
        if home in packed:
            dtype = inside.get_submodule(home.removesuffix(".weight")).compute_dtype
            make = partial(_unpacked, layers.get(layer_name), value, dtype)
            weights[name] = LazyWeight(dtype, value.quant_state.shape, make)
        else:
            weights[name] = LazyWeight(value.dtype, value.shape, make)
    return WeightGroups(weights, max_bytes=max_bytes)


@contextmanager
def adapter_folder(model: nn.Module) -> Iterator[Path]:
    """A temporary folder with the active adapter of a ``peft.PeftModel`` in the format that engines read, in /dev/shm
    if that is writable. If the adapter is sharded this is a collective.
    """
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="llmrl-adapter-", dir=memory if os.access(memory, os.W_OK) else None)
    try:
        write_adapter(model, Path(folder))
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def write_adapter(model: nn.Module, folder: Path) -> None:
    """Writes the active adapter of a ``peft.PeftModel`` in peft's format, into an existing folder."""
    adapter: Any = model.active_adapter
    tensors = _peft("peft").get_peft_model_state_dict(model, adapter_name=adapter)
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = whole(tensor).cpu().contiguous()
        # Files hold a tied weight under each of its names.
        shared = any(value.data_ptr() == other.data_ptr() for other in weights.values())
        weights[name] = value.clone() if shared else value
    _peft("safetensors.torch").save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    settings = copy.copy(model.peft_config[adapter])
    settings.inference_mode = True  # as in the files that peft writes
    if tied := getattr(settings, "modules_to_tie", None):  # peft keeps them apart; older versions read these names only
        last = {name.rpartition(".")[2] for name in (*settings.modules_to_save, *tied)}
        settings.modules_to_save = sorted(last)
    settings.save_pretrained(folder)


def _cast(value: Tensor, base: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The whole tensor, rounded to the precision of the base model: modules that are trained in full are float32."""
    return whole(value, base).to(dtype)


def _is_active(layer: Any) -> bool:
    """True if the layer's output differs from its base's: not if the adapter is already merged into the base."""
    return not (layer.disable_adapters or layer.merged) and bool(layer.active_adapters)


@torch.no_grad()
def _merged(layer: nn.Module, leaf: str, dtype: torch.dtype) -> Tensor:
    """A parameter of the layer's base after merging, in a copy of the layer with unsharded parameters, cast last."""
    # The memo makes deepcopy use these instead of the parameters, which may be sharded: merging needs full tensors.
    plain = {id(own): nn.Parameter(whole(own).clone(), requires_grad=False) for own in layer.parameters()}
    merged: Any = copy.deepcopy(layer, memo=plain)
    merged.merge()
    return merged.get_base_layer().get_parameter(leaf).detach().to(dtype)


@torch.no_grad()
def _unpacked(layer: Any, value: Any, base: torch.dtype, dtype: torch.dtype) -> Tensor:
    """A 4-bit weight, dequantized to ``base``, with the adapters of ``layer`` (None: there are none) merged in."""
    functional = require("bitsandbytes.functional", extra="qlora", used_by="merged_weights")
    matrix = functional.dequantize_4bit(value.data, value.quant_state).to(base)
    for adapter in layer.active_adapters if layer is not None and _is_active(layer) else ():
        matrix += layer.get_delta_weight(adapter).to(base)
    return matrix.to(dtype)


def _peft(module: str) -> Any:
    return require(module, extra="lora", used_by="merged_weights")
