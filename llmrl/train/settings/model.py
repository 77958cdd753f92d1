"""Settings of all recipes: the model, precision, optimizer, checkpoints, processes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llmrl.errors import ConfigError
from llmrl.settings import Settings
from llmrl.train.adapter_files import disagreements, lora_settings, start_adapter
from llmrl.train.settings.environment import with_sets
from llmrl.train.settings.machine import (
    CheckpointSettings,
    LoraSettings,
    MemorySettings,
    ModelOptions,
    OptimSettings,
    ParallelSettings,
    ProfileSettings,
)
from llmrl.train.settings.types import TemplateText
from llmrl.train.settings.unused import settings_without_effect


class TinyModelSettings(Settings):
    """A random model and a byte-level BPE tokenizer, created in memory; the embedded tasks train it."""

    architecture: Literal["qwen2", "qwen3", "llama", "mistral", "gpt2", "qwen2_vl"] = Field(
        "qwen2", description="family of the layers; qwen2_vl reads images"
    )
    hidden_size: int = Field(160, ge=16, description="width")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(5, ge=1, description="attention heads; vllm on a CPU needs hidden_size / heads to be 32 or 64")


class ModelSource(Settings):
    """Fields of all recipes: the model, precision, optimizer, checkpoints, processes."""

    FIXED: ClassVar[tuple[str, ...]] = ("model", "seed", "lora")  # cannot change when a run is resumed

    model: str | TinyModelSettings = Field(
        description="a folder or hub name; a run's folder, for its last checkpoint; an adapter's folder, to go on with "
        "it; 'latest:RECIPE', for the newest checkpoint of that recipe; or a tiny model's sizes"
    )
    chat_template: TemplateText | None = Field(
        None,
        description="a registered template's name, module:name, a .jinja file or jinja text; null: the tokenizer's own",
    )
    template_variables: dict[str, Any] = Field(
        {},
        description="variables of the chat template, such as {enable_thinking: false}; saved with the tokenizer",
        json_schema_extra={"also": ["chat_template_kwargs", "template_kwargs", "enable_thinking"]},
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights and arithmetic; auto: bfloat16 if the GPU has it, else float32"
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="padded tokens per forward pass; on a CPU fewer, for a large model; changes memory, not the result",
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="sequences packed end to end, not padded, and a common beginning, such as the prompt of a group, "
        "computed once; auto: if it saves a fifth and the model can",
    )
    model_options: ModelOptions = ModelOptions()
    lora: LoraSettings | None = Field(
        None, description="adapters to train instead of the model; null: those of an adapter's folder, else all weights"
    )
    memory: MemorySettings = MemorySettings()
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    parallel: ParallelSettings = ParallelSettings()
    log: list[Literal["wandb", "tensorboard", "mlflow"]] = Field(
        [], description="loggers besides metrics.jsonl, which is always written"
    )
    profile: ProfileSettings | None = Field(None, description="steps that torch's profiler traces; null: none")

    @model_validator(mode="after")
    def _settings_have_an_effect(self, info: ValidationInfo) -> ModelSource:
        changed = (info.context or {}).get("changed")
        faults = [
            InitErrorDetails(type=PydanticCustomError("value_error", "{text}", {"text": text}), loc=path, input=None)
            for path, text in settings_without_effect(self)
            if changed is None or any(".".join(path[: n + 1]) in changed for n in range(len(path)))
        ]
        if faults:
            raise ValidationError.from_exception_data(type(self).__name__, faults)
        return self

    def in_bfloat16(self, gpu_has_it: bool | None) -> bool:
        """True if the run computes in bfloat16. ``gpu_has_it``: the GPU supports bfloat16; None: a CPU.

        Raises  ConfigError for bfloat16 on a GPU that does not have it
        """
        if self.dtype == "bfloat16" and gpu_has_it is False:
            raise ConfigError("dtype: bfloat16 needs a GPU that supports it: got an older one; use dtype=float32.")
        return self.dtype == "bfloat16" or (self.dtype == "auto" and bool(gpu_has_it))

    @model_validator(mode="before")
    @classmethod
    def _complete_the_sets(cls, data: object) -> object:
        return with_sets(data)

    @model_validator(mode="before")
    @classmethod
    def _accept_the_word_tiny(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("model") == "tiny":
            return data | {"model": {}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _take_settings_of_an_adapter(cls, data: object) -> object:
        """Fills ``lora`` from the adapter that ``model`` names, without which its weights do not fit."""
        if not isinstance(data, dict) or (adapter := start_adapter(data.get("model"))) is None:
            return data
        given, own = data.get("lora") or {}, lora_settings(adapter)
        if isinstance(given, LoraSettings):
            given = given.model_dump(exclude_unset=True)
        if own is None or not isinstance(given, dict):
            return data
        faults = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{text}", {"text": text}), loc=("lora", name), input=None
            )
            for name, text in disagreements(given, own).items()
        ]
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return data | {"lora": own | given}
