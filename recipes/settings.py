"""The sections that the recipes' YAML files share. Nothing here imports torch: mistakes are told before it loads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "CheckpointSettings",
    "EnvSettings",
    "EvalSettings",
    "ModelSource",
    "OptimSettings",
    "ParallelSettings",
    "SamplingSettings",
    "Settings",
    "TinyModelSettings",
]


class Settings(BaseModel):
    """A section: unknown names are errors, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModelSettings(Settings):
    """A random model and a byte-level BPE tokenizer, made on the spot: what the embedded task trains."""

    architecture: Literal["qwen2", "qwen3", "llama", "mistral", "gpt2"] = Field(
        "qwen2", description="family of the layers"
    )
    hidden_size: int = Field(160, ge=16, description="width")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(4, ge=1, description="attention heads")


class OptimSettings(Settings):
    """AdamW."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate", json_schema_extra={"also": ["learning_rate"]})
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="what follows the warm-up; linear and cosine end at a twentieth of lr"
    )
    warmup: int = Field(0, ge=0, description="optimizer steps until lr is reached")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, on every parameter")
    clip_norm: float = Field(
        1.0, gt=0, description="gradients are scaled down to this norm", json_schema_extra={"also": ["max_grad_norm"]}
    )


class SamplingSettings(Settings):
    """How the policy samples during rollouts; evaluation is greedy."""

    max_tokens: int = Field(
        1024, ge=1, description="longest completion, in tokens", json_schema_extra={"also": ["max_new_tokens"]}
    )
    temperature: float = Field(1.0, gt=0, description="of the softmax that is sampled from, and trained")
    top_p: float = Field(1.0, gt=0, le=1, description="1 keeps the whole distribution; less makes training off-policy")
    top_k: int = Field(0, ge=0, description="0 keeps the whole distribution; more makes training off-policy")


class EnvSettings(Settings):
    """Where prompts come from and who scores the answers."""

    name: Literal["sums", "gsm8k", "chat"] = Field(
        "chat",
        description="sums: the embedded task; gsm8k: its prompt and parser; chat: dataset and reward of your own",
    )
    dataset: str | None = Field(None, description="a .jsonl, .json, .parquet or .csv file, or a hub name")
    config: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset or of an embedded task")
    prompt_column: str | None = Field(None, description="where the prompt is, if it goes by another name")
    answer_column: str | None = Field(None, description="where the reference answer is, if it goes by another name")
    system_prompt: str | None = Field(None, description="first message of every conversation")
    reward: str | None = Field(
        None, description="a plain function, as my_pkg.rewards:exact; called with completion, answer"
    )
    reward_deadline_s: float = Field(20.0, gt=0, description="seconds that the rewards of one batch may take")
    max_turns: int = Field(1, ge=1, description="answers of the policy per conversation")
    on_rewrite: Literal["error", "new_record"] = Field(
        "error",
        description="several turns, and a template that writes earlier ones differently later: stop, or train turns "
        "that do not continue the one before as records of their own",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt")
    too_long: Literal["error", "drop"] = Field("error", description="what becomes of a longer prompt")

    @property
    def max_records(self) -> int:
        """Into how many training records one conversation can fall."""
        return self.max_turns if self.on_rewrite == "new_record" else 1

    @model_validator(mode="after")
    def _chat_needs_data_and_reward(self) -> EnvSettings:
        if self.name == "chat" and (self.dataset is None or self.reward is None):
            missing = " and ".join(key for key in ("dataset", "reward") if getattr(self, key) is None)
            raise ValueError(f"env {self.name} needs {missing}")
        return self


class EvalSettings(Settings):
    """Greedy accuracy on problems that are never trained on."""

    dataset: str | None = Field(None, description="a file or hub name; none: the environment's own held-out split")
    split: str = Field("test", description="which split of it")
    rows: int | None = Field(500, ge=1, description="the first so many problems; null: all")
    every: int = Field(0, ge=0, description="steps between evaluations; 0: before and after only")
    batch_size: int = Field(512, ge=1, description="conversations generated side by side")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")


class CheckpointSettings(Settings):
    """Checkpoints are written at the end and on Ctrl-C whatever these say."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of the newest stay")


class ParallelSettings(Settings):
    """How several processes, started by torchrun, share the work. One process ignores it."""

    mode: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="ddp: whole copies; fsdp2: parameters and optimizer sharded"
    )
    timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the run")


class ModelSource(Settings):
    """Fields that both recipes have to say which model is trained and how."""

    model: str | TinyModelSettings = Field(
        description="a folder or hub name; 'latest:RECIPE', that recipe's newest checkpoint; or a tiny model's sizes"
    )
    chat_template: str | None = Field(
        None, description="a registered template's name or jinja text; null: the tokenizer's own"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights and arithmetic; auto: bfloat16 where the GPU has it, else float32"
    )
    seed: int = Field(0, ge=0, description="everything random follows from it")
    tokens_per_microbatch: int = Field(
        16384, ge=1, description="padded tokens that go through the model at once; changes memory, never the result"
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="sequences end to end instead of padded; auto: where that saves a fifth and the model can"
    )
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    parallel: ParallelSettings = ParallelSettings()
    log: list[Literal["wandb", "tensorboard"]] = Field(
        [], description="mirrors of metrics.jsonl, which is always written"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_the_word_tiny(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("model") == "tiny":
            return data | {"model": {}}
        return data
