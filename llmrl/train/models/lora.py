"""Low-rank adapters (peft) on a model with frozen weights: creation, parameter counts, loading, merging.

`llmrl.train.adapter_files` finds their folders.

Each rank has all adapters, even of a sharded model: they are small, and their gradients are averaged as with DDP.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from llmrl.errors import ConfigError, DataError, did_you_mean
from llmrl.modules.llm.vision import vision_tower
from llmrl.optional import require
from llmrl.train.adapter_files import lora_settings, read_settings, start_adapter
from llmrl.train.models.shape import ModelShape, model_shape
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.model import ModelSource, TinyModelSettings
from llmrl.train.settings.preferences import RewardConfig
from llmrl.weight_update.groups import whole
from llmrl.weight_update.lora import ADAPTER_FILE, merged_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Settings of peft's adapters that `LoraSettings` has, or that say nothing about the weights.
_KNOWN = {"r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "modules_to_save", "exclude_modules"}
_KNOWN |= {"base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"}
_KNOWN |= {"fan_in_fan_out", "ensure_weight_tying", "init_lora_weights"}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that are subtracted from the base


def num_trained(config: ModelSource, shape: ModelShape) -> int:
    """The number of parameters that are trained.

    Raises  ConfigError for target modules that the model does not have
    """
    if config.lora is None:
        return shape.parameters - shape.frozen
    head = shape.hidden if isinstance(config, RewardConfig) else 0
    whole_modules = sum(shape.ends[name] for name in saved_modules(config, shape))
    return config.lora.r * sum(shape.linears[name][1] for name in _targets(config, shape)) + head + whole_modules


def saved_modules(config: ModelSource, shape: ModelShape) -> list[str]:
    """The modules that are trained in full beside adapters: with tied embeddings both ends, or none."""
    asked, known = config.lora.modules_to_save if config.lora else [], list(shape.ends)
    known = known[:1] if isinstance(config, RewardConfig) else known  # it has another output layer
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"lora.modules_to_save: {name} must be the model's embedding or output layer: {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return [name for name in known if name in asked or (asked and 0 in shape.ends.values())]


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
    if start_adapter(config.model) is not None:
        _check_start(config, shape)
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
            "that sampled; set lora.dropout=0."
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
    saved = "".join(f", {name} in full" for name in saved_modules(config, shape))
    begun = " · goes on from the adapter" if start_adapter(config.model) else ""
    return [("lora", f"{count} · r {lora.r}, alpha {lora.alpha:g} on {', '.join(targets)}{saved}{kind}{begun}")]


def _check_start(config: ModelSource, shape: ModelShape) -> None:
    """Raises ConfigError for an adapter to go on from that has something that is not trained here."""
    start: Any = start_adapter(config.model)
    settings, own = read_settings(start), lora_settings(start)
    if own is not None and set(own["target_modules"]) != set(targets := _targets(config, shape)):
        raise ConfigError(
            f"lora.target_modules: must be {own['target_modules']}, as in the adapter {start}: got {targets}; leave it "
            "out."
        )
    usual = require("peft", extra="lora", used_by="lora").LoraConfig().to_dict()
    others = [name for name in settings.keys() - _KNOWN if (settings[name] or None) != (usual.get(name) or None)]
    if str(settings.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        others.append("init_lora_weights")
    if saved_modules(config, shape) and 0 in shape.ends.values() and not settings.get("ensure_weight_tying"):
        others.append("ensure_weight_tying")  # the ends are tied, and were trained apart
    if others:
        what = ", ".join(f"{name}={settings.get(name)!r}" for name in sorted(others))
        raise ConfigError(
            f"model: training goes on from adapters that lora can make: {start} has {what}; merge it into its base by "
            "peft (merge_and_unload), and train the merged model."
        )


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
    trained, except ``lora.modules_to_save`` and the output layer of a reward model, which the adapters' file also
    contains; tied embeddings stay tied.

    Raises  DataError if the weights in ``saved`` do not fit the model
    """
    peft, lora = require("peft", extra="lora", used_by="lora"), config.lora
    shape = model_shape(model)
    tower = next((name for name, module in model.named_modules() if module is vision_tower(model)), None)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=_targets(config, shape),
        modules_to_save=saved_modules(config, shape) or None,
        ensure_weight_tying=bool(lora.modules_to_save) and _is_tied(model),
        exclude_modules=rf"{re.escape(tower)}\..*" if tower else None,  # layer names can equal the decoder's
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=_task(model),
    )
    was_tied, saved = _is_tied(model), saved or start_adapter(config.model)
    adapted = _wrap(model, settings, saved, seed=config.seed)  # each rank initialises all adapters, so with one seed
    if lora.modules_to_save and _is_tied(adapted) != was_tied:
        raise ConfigError(
            f"lora.modules_to_save: peft cannot keep the tied embeddings of {type(model).__name__} tied: leave it out."
        )
    if lora.dropout:  # all other modules stay in evaluation mode, as without adapters
        for module in adapted.modules():
            module.training = isinstance(module, torch.nn.Dropout) and module.p == lora.dropout
    for module in adapted.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # it would repack weights for inference, without gradients
            module.support_avx512bf16_for_cpu = False
    name = model.name_or_path
    settings.base_model_name_or_path = str(Path(name).resolve()) if Path(name).is_dir() and name else name
    return adapted


def _task(model: Any) -> str:
    return "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"  # SEQ_CLS also trains a copy of the output


def _is_tied(model: Any) -> bool:
    """True if the weight of the output layer is that of the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _wrap(model: PreTrainedModel, settings: Any, saved: Path | None, *, seed: int = 0) -> Any:
    """A ``peft.PeftModel`` with adapters from ``saved``, or new ones, float32 and whole; in evaluation mode."""
    peft = require("peft", extra="lora", used_by="lora")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that Transformers has renamed
        torch.manual_seed(seed)
        with _whole_copies(model, settings):
            adapted = peft.get_peft_model(model, settings).eval()
    _own_heads(adapted)
    if saved is not None:
        _load(adapted, saved)
    return adapted


@contextmanager
def _whole_copies(model: PreTrainedModel, settings: Any) -> Iterator[None]:
    """Context in which sharded modules that peft copies are whole: a part of a tensor cannot be copied."""
    names = {name.rpartition(".")[2] for name in settings.modules_to_save or ()} | {"score"}
    sharded = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names and any(isinstance(own, DTensor) for own in module.parameters())
    }
    memo: dict[int, Any] = {}  # deepcopy takes these in place of the parameters: tied ones stay tied
    for own in (own for module in sharded.values() for own in module.parameters()):
        if id(own) not in memo:
            memo[id(own)] = torch.nn.Parameter(whole(own), requires_grad=False)
    for name, module in sharded.items():
        model.set_submodule(name, copy.deepcopy(module, memo))
    yield
    for name, module in sharded.items():
        wrapper = model.get_submodule(name)
        if hasattr(wrapper, "original_module"):
            wrapper.original_module = module.requires_grad_(False)
        else:
            model.set_submodule(name, module)


@torch.no_grad()
def _own_heads(adapted: Any) -> None:
    """Makes peft's copies of whole modules float32 and unsharded, like the adapters; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for wrapper in list(adapted.modules()):
        copies = getattr(wrapper, "modules_to_save", None)
        if not isinstance(copies, torch.nn.ModuleDict):
            continue
        wrapper.register_forward_pre_hook(_cast_input)
        for module in copies.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                own = made[id(value)] if id(value) in made else torch.nn.Parameter(whole(value).float())
                made[id(value)] = made[id(own)] = own  # a later name of a tied weight may find it replaced already
                setattr(module, name, own)


def _cast_input(wrapper: Any, inputs: tuple[Any, ...]) -> Any:
    """A whole module in float32 above layers in bfloat16, which FSDP casts without autocast."""
    hidden, *others = inputs  # embeddings and heads are called with one
    if wrapper.disable_adapters or not hidden.is_floating_point() or torch.is_autocast_enabled(hidden.device.type):
        return None
    return (hidden.to(wrapper.weight.dtype), *others)


# --- weights of an adapter's folder -----------------------------------------------------------------------------------


def _weights(adapter: Path) -> dict[str, torch.Tensor]:
    load_file = require("safetensors.torch", extra="lora", used_by="lora").load_file
    try:
        return load_file(adapter / ADAPTER_FILE)
    except Exception as error:  # safetensors has its own
        raise DataError(f"adapter {adapter}: {ADAPTER_FILE} cannot be read: {error}.") from error


def _state(adapted: Any) -> dict[str, torch.Tensor]:
    """The weights of the adapters by their names in files; they share memory with the model's."""
    peft = require("peft", extra="lora", used_by="lora")
    return peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)


def _load(adapted: Any, adapter: Path) -> None:
    """Loads the weights of a folder; the output layer of a reward model stays as it is if they are a language model's.

    Raises  DataError if they are not those of these adapters
    """
    weights, own = _weights(adapter), _state(adapted)
    weights |= {name: value for name, value in own.items() if name.endswith(".score.weight") and name not in weights}
    misfits = [f"{name} is missing" for name in own.keys() - weights.keys()]
    misfits += [f"{name} has no place" for name in weights.keys() - own.keys()]
    misfits += [
        f"{name} is {list(weights[name].shape)}, not {list(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if misfits:
        raise DataError(
            f"adapter {adapter}: its weights must fit its base model and its settings: {len(misfits)} do not, such as "
            f"{', '.join(sorted(misfits)[:3])}; is model_options.base_model the one that it was trained on?"
        )
    require("peft", extra="lora", used_by="lora").set_peft_model_state_dict(adapted, weights)


class ReferenceAtStart:
    """The adapters of a folder in place of a model's own: the reference of a run that goes on from them.

    adapted  a ``peft.PeftModel`` of the same adapters
    """

    def __init__(self, adapted: Any, adapter: Path) -> None:
        self._own, weights = _state(adapted), _weights(adapter)
        self._start = {name: weights[name].to(own) for name, own in self._own.items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """A block in which the model has them; behind it the model has its own weights again."""
        now = {name: own.clone() for name, own in self._own.items()}
        try:
            self._fill(self._start)
            yield
        finally:
            self._fill(now)

    @torch.no_grad()
    def _fill(self, values: dict[str, torch.Tensor]) -> None:
        for name, own in self._own.items():
            own.copy_(values[name])


@torch.no_grad()
def merge_saved(model: PreTrainedModel, adapter: Path) -> None:
    """Merges the adapters of a folder into the weights of their base model, sharded or not, with the modules that were
    trained in full.

    Raises  DataError for adapters that are not merged here, or do not fit the model
    """
    settings = read_settings(adapter)
    special = [
        name for name in ("trainable_token_indices", "target_parameters", "layer_replication") if settings.get(name)
    ]
    if settings.get("peft_type") != "LORA" or special:
        what = ", ".join(special) or settings.get("peft_type")
        raise DataError(f"adapter {adapter}: must be of LoRA: got {what}; merge it by peft (merge_and_unload).")
    peft = require("peft", extra="lora", used_by="lora")
    if settings.get("modules_to_save") and not settings.get("ensure_weight_tying") and _is_tied(model):
        _untie(model, adapter)
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    own = dict(model.named_parameters(remove_duplicate=False))
    made = peft.PeftConfig.from_pretrained(adapter)
    made.task_type = _task(model)  # a reward model may begin from the adapters of a language model
    made.base_model_name_or_path = model.name_or_path  # peft warns of a base that has moved
    adapted = _wrap(model, made, adapter)
    for group in merged_weights(adapted, only_changed=True):
        for name, value in group.items():
            place = own[name]
            value = value.to(place.device)
            place.copy_(
                distribute_tensor(value, place.device_mesh, place.placements) if isinstance(place, DTensor) else value
            )
    originals = {
        name: module.original_module for name, module in model.named_modules() if "original_module" in module._modules
    }
    adapted.unload()
    for name, module in originals.items():  # peft leaves its copies in their places
        model.set_submodule(name, module)
    if hasattr(model, "peft_config"):
        del model.peft_config  # it would say that the model has adapters
    for parameter, flag in before:
        parameter.requires_grad_(flag)


def _untie(model: PreTrainedModel, adapter: Path) -> None:
    """Gives the output layer a weight of its own, for an adapter that trained it apart from the embedding."""
    head = model.get_output_embeddings()
    if isinstance(head.weight, DTensor):
        raise DataError(
            f"adapter {adapter}: its base ties the output layer to the embedding, and it was trained apart from it: "
            "such an adapter is not merged into a sharded model; merge it by peft (merge_and_unload)."
        )
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
