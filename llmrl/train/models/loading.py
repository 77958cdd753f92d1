"""Loads model and tokenizer: a folder, a hub name, another recipe's newest checkpoint, or a tiny random model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from llmrl.data.llm.templates import ChatTemplate, choose_template, ending_with, find_template
from llmrl.errors import ConfigError, DataError, TemplateError
from llmrl.modules.llm.engines.transformers import vocabulary_size
from llmrl.modules.llm.model_files import check_letters, check_whole, loaded
from llmrl.modules.llm.rendering import Renderer, text_tokenizer
from llmrl.modules.llm.routers import router_modules
from llmrl.modules.llm.sequence_split import why_not_split
from llmrl.modules.llm.vision import load_processor, model_class, vision_tower
from llmrl.run.checkpoint import CHECKSUMS, check_files
from llmrl.run.files import share_files
from llmrl.run.model_names import resolve_model
from llmrl.train.adapter_files import adapter_in, base_of, start_adapter, tokenizer_of
from llmrl.train.models.lora import add_adapters, merge_saved, quantization
from llmrl.train.models.shape import block_matrices
from llmrl.train.settings.model import ModelSource, TinyModelSettings
from llmrl.train.settings.preferences import RewardConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from llmrl.train.distributed import Session


def model_files(config: ModelSource, *, runs: Path) -> str | TinyModelSettings:
    """`resolve_model`, with the base model in place of adapters: where configuration and weights are."""
    source, given = resolve_model(config.model, runs=runs), config.model_options.base_model
    while (adapter := adapter_in(source)) is not None:
        source, given = base_of(adapter, given), None
    return source


def load_tokenizer(config: ModelSource, *, runs: Path) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The tokenizer of ``config.model``, with the run's chat template and a padding id; for a model that reads images,
    the processor that contains it.

    Raises  DataError if it cannot be loaded; TemplateError for an unknown template, or if there is none and the usual
            ones do not fit the tokenizer; ConfigError for a template that differs from the one registered for the model
    """
    if isinstance(config.model, TinyModelSettings):
        from llmrl.testing import tiny_processor, tiny_tokenizer

        processor = tiny_processor() if config.model.architecture == "qwen2_vl" else tiny_tokenizer()
    else:
        source: Any = resolve_model(config.model, runs=runs)
        base = None
        if (adapter := start_adapter(source)) is not None:
            base, given = model_files(config, runs=runs), config.model_options.base_model
            source = tokenizer_of(adapter, given)
        processor = loaded(load_processor, source, model=base)
    tokenizer = text_tokenizer(processor)
    check_letters(tokenizer, config.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    row = choose_template(tokenizer, config.chat_template, config.template_variables)
    if config.chat_template is None and not tokenizer.chat_template:
        _check_guessed(row, tokenizer)
    if row.name != "tokenizer" or config.template_variables:  # saved in checkpoints, whose paths do not name the model
        tokenizer.chat_template = row.jinja
    if (taken := find_template(tokenizer)).jinja != row.jinja:
        raise ConfigError(
            f"chat_template: a run has one template: got {row.name!r}, but {taken.name!r} is registered for models "
            f"named {tokenizer.name_or_path!r}; leave out chat_template, or the template's keyword."
        )
    if processor is not tokenizer:
        processor.chat_template = tokenizer.chat_template
    return processor


def _check_guessed(row: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises TemplateError if a template that was guessed for a tokenizer without one never ends a turn for it."""
    if Renderer(tokenizer, chat_template=row.jinja).check().stop_token_trained:
        return
    eos = tokenizer.eos_token
    fitting = " or ".join(f"chat_template={name}" for name in ending_with(eos))
    raise TemplateError(
        f"chat_template: a model without a chat template needs one that ends a turn with a token of its tokenizer: the "
        f"guess {row.name!r} writes ordinary text there, so the model would never stop; set "
        f"{fitting or 'one of your own'}, which ends a turn with {eos!r}, or the path of a .jinja file that does."
    )


def load_model(
    config: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    session: Session,
    *,
    runs: Path,
    checked: bool = False,
    adapter: Path | None = None,
) -> PreTrainedModel:
    """The model of ``config.model``, float32, on the session's device, in evaluation mode; sharded if the session is.

    With ``config.lora`` a ``peft.PeftModel`` around it, in the session's precision, with new adapters or those of the
    folder ``adapter``. The checksums of a folder that has them are verified, unless ``checked``.

    Raises  DataError if it cannot be loaded
    """
    is_tiny = isinstance(config.model, TinyModelSettings)
    if is_tiny:
        model = made_model(config, tokenizer).to(session.device)
    else:
        model = load_files(config, session, runs=runs, checked=checked)
    if session.split:
        session.split.prepare(model)
    model = session.shard(model) if is_tiny and session.sharded else model
    freeze_vision(model, config)
    model = add_adapters(config, model, adapter) if config.lora else model
    model.get_output_embeddings().in_float32 = config.model_options.float32_head
    return model


def load_files(
    config: ModelSource, session: Session, *, runs: Path, checked: bool = False, **head: Any
) -> PreTrainedModel:
    """Loads the model from the files of ``config.model``. ``head``: options of a sequence classifier, whose output
    layer replaces the head; it is random unless the files have one. For the other arguments see `load_model`.
    """
    source = resolve_model(config.model, runs=runs)
    if not checked and (Path(source) / CHECKSUMS).exists():
        check_files(Path(source))
    return _read_files(config, source, session, head, config.model_options.base_model)


def _read_files(
    config: ModelSource, source: str, session: Session, head: Mapping[str, Any], base: str | None = None
) -> PreTrainedModel:
    if (adapter := adapter_in(source)) is not None:
        model = _read_files(config, base_of(adapter, base), session, head)
        if config.lora is None or start_adapter(source) is None:  # else training goes on with them: `add_adapters`
            if config.lora and config.lora.quantize:
                raise ConfigError(f"lora.quantize: 4-bit weights cannot take the adapters of {source}: leave it out.")
            merge_saved(model, adapter)
            model.name_or_path = ""  # no file has the merged weights
        return model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    # Frozen weights are kept in the compute precision.
    dtype = torch.bfloat16 if config.lora and session.low_precision else torch.float32
    kind = AutoModelForSequenceClassification if head else loaded(model_class, source)
    load = partial(_load_sharded, session, kind) if session.sharded else partial(_read_all, kind)
    offloads = session.offloads and session.sharded
    goes_there = session.device.type != "cpu" and not offloads  # read to the device directly, without a copy on the CPU
    place = {"device_map": {"": session.device}} if goes_there else {}
    options = place | _attention(config, loaded(AutoConfig.from_pretrained, source)) | quantization(config, dtype)
    model = loaded(load, source, dtype=dtype, **options, **head).eval()
    _repair_generation_config(model)
    if offloads:  # FSDP moves offloaded parameters to the device, but not buffers
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(session.device)
    return model


_KEPT_SETTINGS = ("do_sample", "eos_", "pad_", "bos_", "decoder_", "max_", "min_length", "min_new", "transformers_")


def _repair_generation_config(model: PreTrainedModel) -> None:
    """Resets sampling settings without effect, which published models have and Transformers does not write."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    defaults = type(config)()
    # One after another, so that what has an effect stays; ids of tokens and lengths are never among them.
    for name in (name for name in config.to_diff_dict() if not name.startswith(_KEPT_SETTINGS)):
        try:
            return config.validate(strict=True)
        except ValueError as error:
            if f"`{name}`" in str(error):
                setattr(config, name, getattr(defaults, name, None))


def freeze_vision(model: PreTrainedModel, config: ModelSource) -> PreTrainedModel:
    """Freezes the vision tower if ``model_options.freeze_vision`` is set, and returns the model."""
    tower = vision_tower(model)
    if tower is not None and config.model_options.freeze_vision:
        tower.requires_grad_(False)
    return model


def save_made_model(config: ModelSource, folder: Path, session: Session) -> str:
    """Writes the tiny model of ``config`` to ``folder``, as the base of its adapters, and returns the path."""

    def save() -> str:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        tokenizer = load_tokenizer(config, runs=folder.parent)
        made_model(config, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        share_files(folder, like=folder / "config.json")
        return str(folder)

    return session.on_first(save)


def _load_sharded(session: Session, auto_class: Any, source: str, **options: Any) -> PreTrainedModel:
    """The model of ``source``, sharded before it is read: each rank reads only its part of each weight.

    If Transformers joins or splits weights along the sharded dimension, or a stack of experts is too small, rank 0
    reads the whole model and sends the other ranks their parts, one weight at a time.
    """
    from transformers import AutoConfig

    built = {name: options[name] for name in ("dtype", "attn_implementation") if name in options}
    head = {name: options[name] for name in ("num_labels", "pad_token_id") if name in options}

    def build(**ties: bool) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **head, **ties)
        with torch.device("meta"):
            return auto_class.from_config(config, trust_remote_code=False, **built)

    model = build()
    kind = type(model)
    if not _can_slice(model, session):
        with session.raises_on_all():
            whole = _read_all(kind, source, **options | {"device_map": None}) if session.is_first else None
        if model.all_tied_weights_keys and not session.on_first(lambda: bool(whole.all_tied_weights_keys)):
            model = build(tie_word_embeddings=False)
        return _deal_out(session, session.shard(model), whole)
    tie = kind.tie_weights  # `from_pretrained` disables it until all weights are read

    def init(self: PreTrainedModel, *arguments: Any, **settings: Any) -> None:
        kind.__init__(self, *arguments, **settings)
        tie(self, recompute_mapping=False)  # FSDP shares a parameter only if it is tied before it is sharded
        with torch.device("cpu"):  # for tensors created while sharding, unlike the parameters
            session.shard(self)

    # Transformers builds the model on the meta device, and reads only this rank's part of sharded parameters.
    sharding = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    with _reserving_shards():
        return _read_all(sharding, source, **options)


@contextmanager
def _reserving_shards() -> Iterator[None]:
    """Lets Transformers, which allocates a GPU's memory for all weights before it reads them, count shards as shards. It
    counts them as wholes, but for families with a plan for tensor parallelism.
    """
    from transformers import modeling_utils

    original = modeling_utils.get_total_byte_count

    def count(model: PreTrainedModel, places: Mapping[str, torch.device], *quantizer: Any) -> dict[torch.device, int]:
        held: dict[torch.device, int] = dict.fromkeys(places.values(), 0)
        seen: set[int] = set()  # a tied weight has several names
        for name, device in places.items():
            value = model.get_parameter_or_buffer(name)
            held[device] += 0 if id(value) in seen else _local(value).nbytes
            seen.add(id(value))
        return held

    modeling_utils.get_total_byte_count = count
    try:
        yield
    finally:
        modeling_utils.get_total_byte_count = original


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _read_all(kind: Any, source: str, **options: Any) -> PreTrainedModel:
    """``kind.from_pretrained``, but missing weights are an error: Transformers would initialise them and warn. Weights
    that the configuration ties are untied, also in the configuration, if the files have different values for them.
    """
    from transformers.utils import logging

    has_head, verbosity = "num_labels" in options, logging.get_verbosity()
    with warnings.catch_warnings():
        if has_head:  # a language model's files have an lm_head, not this output layer
            warnings.filterwarnings("ignore", "DTensor random operators")  # its initialisation, which `_draw` replaces
            logging.set_verbosity_error()
        try:
            model, found = kind.from_pretrained(source, output_loading_info=True, **options)
        finally:
            logging.set_verbosity(verbosity)
    if model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys:
        del model
        return _read_all(kind, source, **options, tie_word_embeddings=False)
    missing = sorted(found["missing_keys"])
    if has_head:
        made_up = [name for name in missing if not name.startswith(f"{model.base_model_prefix}.")]
        missing = [name for name in missing if name not in made_up]
        _draw(model, made_up)
    check_whole(missing)
    return model


@torch.no_grad()
def _draw(model: PreTrainedModel, names: list[str]) -> None:
    """Initialises these weights from torch's seed: the same values on any number of ranks."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for name in names:
        own = model.get_parameter(name)
        value = torch.empty(own.shape).normal_(std=model.config.initializer_range, generator=generator)
        fill_weight(own, value.to(own.dtype))


def fill_weight(own: torch.Tensor, value: torch.Tensor) -> None:
    """Copies the whole ``value`` into a weight; for a sharded weight, this rank's part of it (a collective)."""
    if isinstance(own, DTensor):
        value = distribute_tensor(value.to(own.device_mesh.device_type), own.device_mesh, own.placements)
    own.copy_(value)


def _can_slice(model: PreTrainedModel, session: Session) -> bool:
    """True if each rank can read only its rows of every weight: Transformers' conversions work on slices of rows."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    # Sharding cuts the first dimension. Conversions that join or split weights along it need rows that another rank
    # reads; the exception is stacking whole tensors in a new first dimension.
    num_parts = session.mesh.size(-1)
    for conversion in get_model_conversion_mapping(model):
        for number, operation in enumerate(getattr(conversion, "operations", ())):
            stacks = number == 0 and type(operation).__name__ == "MergeModulelist" and operation.dim == 0
            if not stacks and getattr(operation, "dim", 0) < 1:
                return False
    # of a stack (experts) a rank reads whole members, so there must be one for each rank
    return all(len(weight) >= num_parts for weight in model.parameters() if weight.ndim > 2)


@torch.no_grad()
def _deal_out(session: Session, model: PreTrainedModel, whole: PreTrainedModel | None) -> PreTrainedModel:
    """Fills the sharded meta-device ``model`` with the weights and buffers of rank 0's ``whole``."""
    model.to_empty(device="cpu" if session.offloads else session.device)
    model.tie_weights()  # `to_empty` unties them
    values = None if whole is None else {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        # One weight at a time: the other ranks never hold more than one whole weight besides their own parts.
        value = torch.empty(own.shape, dtype=own.dtype) if values is None else values[name]
        value = value.detach().to(session.device)
        if not isinstance(own, DTensor):
            dist.broadcast(value, 0)
        fill_weight(own, value)
    return model


def made_model(config: ModelSource, tokenizer: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedModel:
    """The tiny model of ``config``, on torch's default device."""
    from llmrl.testing import tiny_model

    def make(source: str, **options: Any) -> PreTrainedModel:
        model = tiny_model(tokenizer, seed=config.seed, **config.model.model_dump())
        if (attention := config.model_options.attn_implementation) is not None:
            model.set_attn_implementation(attention)
        return model

    return loaded(make, "tiny")


def _attention(config: ModelSource, sizes: PretrainedConfig) -> dict[str, Any]:
    """The arguments of transformers' ``from_pretrained`` and ``from_config`` from ``model_options``.

    Raises  ConfigError for attention that would leave out the cap of attention scores that the model has (Gemma 2)
    """
    asked = config.model_options.attn_implementation
    # Some versions of transformers choose sdpa for such models, which ignores the cap.
    if getattr(sizes.get_text_config(), "attn_logit_softcapping", None) and asked in (None, "sdpa"):
        if asked == "sdpa":
            raise ConfigError(
                "model_options.attn_implementation: must apply the model's attn_logit_softcapping: got sdpa, which "
                "ignores it; leave it out, or use eager or flash_attention_2."
            )
        asked = "eager"
    return {} if asked is None else {"attn_implementation": asked}


def meta_model(config: ModelSource, tokenizer: PreTrainedTokenizerBase, *, runs: Path) -> PreTrainedModel:
    """The model of ``config.model`` on the meta device, without weights.

    Raises  DataError if its configuration cannot be read, or lacks what ``model_options`` asks for; ConfigError for
            settings that this model cannot be trained with
    """
    from transformers import AutoConfig

    def build(source: str, **options: Any) -> PreTrainedModel:
        sizes = AutoConfig.from_pretrained(source, **options)
        return model_class(sizes).from_config(sizes, dtype=torch.float32, **_attention(config, sizes))

    with torch.device("meta"):
        if isinstance(config.model, TinyModelSettings):
            model = made_model(config, tokenizer)
        else:
            model = loaded(build, model_files(config, runs=runs))
    check_model(config, model)
    return freeze_vision(model, config)


def check_rows(model: PreTrainedModel, rows: Sequence[Tensor]) -> str:
    """A remark for the plan about rows that are longer than the positions that ``model`` was made for, or "".

    Raises  DataError for ids outside of the embedding, and for rows longer than learned positions
    """
    size, longest = vocabulary_size(model), max(map(len, rows), default=0)
    largest = max((int(ids.max()) for ids in rows if len(ids)), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"data: ids must be within the model's embedding of {size} tokens: got {largest}; the tokenizer has tokens "
            "that the model does not: resize its embedding (model.resize_token_embeddings), or use its own tokenizer."
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None or longest <= positions:
        return ""
    words, tables = model.get_input_embeddings(), [part for part in model.modules() if isinstance(part, nn.Embedding)]
    # Some models have two positions more than they use.
    if any(part is not words and positions <= part.num_embeddings <= positions + 2 for part in tables):
        raise DataError(
            f"data: rows must fit the {positions} positions that the model has learned: got one of {longest} tokens; "
            f"set max_length={positions} or less."
        )
    return f" · up to {longest} tokens, more than the {positions} positions that the model was made for"


def check_model(config: ModelSource, model: PreTrainedModel) -> None:
    """Raises ConfigError for settings that ``model``, on any device, cannot be trained with."""
    if isinstance(config, RewardConfig) and vision_tower(model) is not None:
        raise ConfigError(
            f"model: a reward model reads text alone: got {type(model).__name__}, which reads images; use a language "
            "model, or llmrl dpo, which trains on pairs with images."
        )
    if config.lora and not config.model_options.freeze_vision and vision_tower(model) is not None:
        raise ConfigError(
            "model_options.freeze_vision=false: lora trains adapters of the decoder layers only: use "
            "model_options.freeze_vision=true, or leave lora out."
        )
    if config.model_options.router_aux_loss and not router_modules(model):
        raise ConfigError(
            f"model_options.router_aux_loss must be 0 or null for a model without a mixture of experts: got "
            f"{config.model_options.router_aux_loss} for {type(model).__name__}."
        )
    if config.memory.offload == "parameters" and (config.parallel.mode, config.optim.name) != ("fsdp2", "adamw"):
        raise ConfigError(
            "memory.offload=parameters needs parallel.mode=fsdp2, several processes and optim.name=adamw, which then "
            f"computes in host memory: got {config.parallel.mode} and {config.optim.name}."
        )
    if (config.parallel.mode, config.optim.name) == ("fsdp2", "adamw_8bit") and config.lora is None:
        raise ConfigError(
            "optim.name=adamw_8bit cannot be used with parallel.mode=fsdp2: checkpoints cannot store its moments; "
            "use optim.name=adamw_offload, or parallel.mode=ddp."
        )
    if config.optim.name == "muon" and (config.lora is not None or not block_matrices(model)):
        got = "lora, whose matrices are factors of one" if config.lora is not None else "a model without them"
        raise ConfigError(
            f"optim.name=muon trains the 2-D weights of the decoder layers as they are: got {got}; use adamw."
        )
    if (size := config.parallel.context) > 1:
        fault = why_not_split(model, size)
        if fault is None and config.packing == "on":
            fault = "packs are not split: use packing=auto"
        if fault is None and config.memory.compile:
            fault = "compiled layers do not exchange slices: use memory.compile=false"
        if fault:
            raise ConfigError(f"parallel.context={size}: sequences of {type(model).__name__} cannot be split: {fault}.")
