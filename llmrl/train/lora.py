"""Low-rank adapters (peft) on a model with frozen weights: creation, parameter counts, loading, merging.

Each rank has all adapters, even of a sharded model: they are small, and their gradients are averaged as with DDP.
"""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from llmrl.errors import ConfigError, did_you_mean
from llmrl.modules.llm.vision import vision_tower
from llmrl.optional import require
from llmrl.train.model_shape import ModelShape, model_shape
from llmrl.train.preference_settings import RewardConfig
from llmrl.train.settings import GRPOConfig, ModelSource, TinyModelSettings
from llmrl.weight_update.groups import whole
from llmrl.weight_update.lora import ADAPTER_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter"  # folder in a checkpoint, in peft's format


def num_trained(config: ModelSource, shape: ModelShape) -> int:
    """The number of parameters that are trained.

    Raises  ConfigError for target modules that the model does not have
    """
    if config.lora is None:
        return shape.parameters - shape.frozen
    head = shape.hidden if isinstance(config, RewardConfig) else 0
    return config.lora.r * sum(shape.linears[name][1] for name in _targets(config, shape)) + head


def _targets(config: ModelSource, shape: ModelShape) -> list[str]:
    asked, known = config.lora.target_modules, list(shape.linears)
    for name in known if asked == "all-linear" else asked:
        if name not in known:
            raise ConfigError(
                f"lora.target_modules: {name} must be a linear layer of the model's decoder layers: "
                f"{', '.join(known)}.{did_you_mean(name, known)}"
            )
    return known if asked == "all-linear" else list(asked)


def lora_rows(config: ModelSource, shape: ModelShape) -> list[tuple[str, str]]:
    """The plan's row on adapters; none without ``lora``.

    Raises  ConfigError for settings that do not work with the model or this run; MissingDependencyError
    """
    lora = config.lora
    if lora is None:
        return []
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about CPU kernels at each import
    require("peft", extra="lora", used_by="lora")
    trained, targets = num_trained(config, shape), _targets(config, shape)
    if not targets:
        raise ConfigError("lora: needs linear layers to adapt: target_modules, or the model, has none.")
    if lora.dropout and isinstance(config, GRPOConfig):
        raise ConfigError(
            f"lora.dropout: must be 0 for grpo: got {lora.dropout:g}; the trained policy would differ from the policy "
            "that sampled."
        )
    if lora.quantize:
        require("bitsandbytes", extra="qlora", used_by="lora.quantize=nf4")
        if isinstance(config.model, TinyModelSettings):
            raise ConfigError("lora.quantize: needs a model that is read from files: got a tiny random model.")
        if config.parallel.mode == "fsdp2":
            raise ConfigError(
                "lora.quantize: cannot be used with parallel.mode fsdp2: 4-bit weights are packed as a whole and "
                "cannot be read shard by shard; use parallel.mode=ddp, or leave lora.quantize out."
            )
    kind = f" · the model's linear layers in {lora.quantize}" if lora.quantize else ""
    count = f"{trained:,} of {shape.parameters:,} parameters trained".replace(",", " ")
    return [("lora", f"{count} · r {lora.r}, alpha {lora.alpha:g} on {', '.join(targets)}{kind}")]


def quantization(config: ModelSource, dtype: torch.dtype) -> dict[str, Any]:
    """The argument of transformers' ``from_pretrained`` that quantises weights; {} without ``lora.quantize``."""
    if config.lora is None or config.lora.quantize is None:
        return {}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=config.lora.quantize, bnb_4bit_compute_dtype=dtype
        )
    }


def add_adapters(config: ModelSource, model: PreTrainedModel, saved: Path | None = None) -> Any:
    """A ``peft.PeftModel`` around ``model``, sharded or not, with adapters from the folder ``saved``, or new ones that
    are the same on every rank and leave the model's outputs unchanged. Adapters are float32. Nothing else is
    trained, except the output layer of a reward model, which the adapters' file also contains.
    """
    peft, lora = require("peft", extra="lora", used_by="lora"), config.lora
    tower = next((name for name, module in model.named_modules() if module is vision_tower(model)), None)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=_targets(config, model_shape(model)),
        exclude_modules=rf"{re.escape(tower)}\..*" if tower else None,  # layer names can equal the decoder's
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",  # SEQ_CLS also trains a copy of the output
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that Transformers has renamed
        torch.manual_seed(config.seed)  # each rank initialises all adapters, so with one seed
        adapted = peft.get_peft_model(model, settings).eval()
    _own_heads(adapted)
    if saved is not None:
        load_file = require("safetensors.torch", extra="lora", used_by="lora").load_file
        peft.set_peft_model_state_dict(adapted, load_file(saved / ADAPTER_FILE))
    if lora.dropout:  # all other modules stay in evaluation mode, as without adapters
        for module in adapted.modules():
            module.training = isinstance(module, torch.nn.Dropout) and module.p == lora.dropout
    for module in adapted.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # it would repack weights for inference, without gradients
            module.support_avx512bf16_for_cpu = False
    name = model.name_or_path
    settings.base_model_name_or_path = str(Path(name).resolve()) if Path(name).is_dir() and name else name
    return adapted


@torch.no_grad()
def _own_heads(adapted: Any) -> None:
    """Makes peft's copies of output layers float32 and unsharded, like the adapters."""
    for copies in (getattr(module, "modules_to_save", None) for module in adapted.modules()):
        for module in copies.modules() if isinstance(copies, torch.nn.ModuleDict) else ():
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(whole(value).float()))


# --- adapters in a folder ---------------------------------------------------------------------------------------------


def is_adapter(folder: str) -> bool:
    """True for a checkpoint with adapters but without the whole model."""
    return (Path(folder) / ADAPTER).is_dir() and not any(Path(folder).glob("model*.safetensors"))


def base_of(folder: str) -> str:
    """The base model of a checkpoint's adapters."""
    return json.loads((Path(folder) / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"]


@torch.no_grad()
def merge_saved(model: PreTrainedModel, folder: str) -> None:
    """Merges a checkpoint's adapters into the weights of their base model, sharded or not; for a reward model also
    copies the output layer that was trained with them.
    """
    path = Path(folder) / ADAPTER
    settings = json.loads((path / "adapter_config.json").read_text())
    weights = require("safetensors.torch", extra="lora", used_by="lora").load_file(path / ADAPTER_FILE)
    scale = settings["lora_alpha"] / (math.sqrt(settings["r"]) if settings["use_rslora"] else settings["r"])
    for name, down in weights.items():
        stem, is_down, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if stem == "score.weight" and hasattr(model, "score"):
            model.score.weight.copy_(down)
        if not is_down:
            continue
        delta = weights[name.replace(".lora_A.", ".lora_B.")] @ down * scale  # W + B A alpha / r
        module = model.get_submodule(stem)
        own: Any = module.weight
        delta = (delta.T if type(module).__name__ == "Conv1D" else delta).to(own.device)
        own += distribute_tensor(delta, own.device_mesh, own.placements) if isinstance(own, DTensor) else delta
