"""The settings that choose memory, speed and optimizer for a machine; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from llmrl.errors import ConfigError
from llmrl.settings import Settings

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class MuonSettings(Settings):
    """Muon, by the names of ``torch.optim.Muon``."""

    lr: float | None = Field(None, gt=0, le=100, description="peak learning rate of the matrices; null: optim.lr")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the momentum")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="times the rate of a matrix of A x B: 0.2 sqrt(max(A, B)), so that AdamW's rates fit; or "
        "sqrt(max(1, A / B))",
    )


class OptimSettings(Settings):
    """AdamW, or Muon with AdamW."""

    name: Literal["adamw", "adamw_8bit", "adamw_offload", "muon"] = Field(
        "adamw",
        description="adamw_8bit: a quarter of the memory, by torchao; adamw_offload: moments in host memory; muon: for "
        "the matrices of the decoder layers, AdamW for all else",
    )
    muon: MuonSettings = MuonSettings()
    lr: float = Field(
        1e-6, gt=0, le=100, description="peak learning rate", json_schema_extra={"also": ["learning_rate"]}
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="schedule after warm-up; linear and cosine end at a twentieth of lr"
    )
    warmup: int = Field(0, ge=0, description="optimizer steps until lr is reached")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="AdamW's decay rates")
    weight_decay: float = Field(0.0, ge=0, le=100, description="AdamW's weight decay, on every parameter")
    clip_norm: float = Field(
        1.0, gt=0, description="gradients are scaled down to this norm", json_schema_extra={"also": ["max_grad_norm"]}
    )

    @model_validator(mode="after")
    def _muon_is_chosen(self) -> OptimSettings:
        if self.name != "muon" and self.muon != MuonSettings():
            raise ValueError(f"optim.muon is for optim.name muon: got {self.name}")
        return self


class MemorySettings(Settings):
    """Trades time for memory. No setting here changes a result; ``--dry-run`` prints the memory that a run needs."""

    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="decoder layers keep only their input and recompute the rest in the backward pass; auto: if a "
        "GPU would be too small otherwise",
    )
    offload: Literal["none", "activations", "parameters"] = Field(
        "none",
        description="kept in host memory: activations for the backward pass; or, with parallel.mode fsdp2, weights, "
        "gradients and optimizer, which then computes there",
    )
    compile: bool = Field(False, description="torch.compile of decoder layers: slower to start, faster on a GPU")


class ModelOptions(Settings):
    """Precision, kernels and trained parts of the model."""

    attn_implementation: str | None = Field(
        None, description="sdpa, eager, flash_attention_2 or another name in transformers; null: its default"
    )
    float32_head: bool = Field(
        False, description="output layer in float32 even if the model is in bfloat16: more exact log-probs"
    )
    base_model: str | None = Field(
        None, description="below adapters that ``model`` names: a folder or hub name; null: the one that they name"
    )
    freeze_vision: bool = Field(True, description="do not train the vision tower of a model that reads images")
    router_aux_loss: float | None = Field(
        None,
        ge=0,
        description="mixtures of experts: weight of the load-balancing loss; null: the model's own, 0: none",
    )


class LoraSettings(Settings):
    """Low-rank adapters on the model's linear layers; only they are trained. Needs peft."""

    r: int = Field(16, ge=1, description="rank", json_schema_extra={"also": ["rank"]})
    alpha: float = Field(32.0, gt=0, description="an adapter's output is multiplied by alpha / r")
    rslora: bool = Field(False, description="multiply by alpha / sqrt(r) instead")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of adapter inputs; not for grpo")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="layers that get one, such as [q_proj, v_proj]; all-linear: all but the output layer"
    )
    modules_to_save: list[str] = Field(
        [], description="trained in full beside the adapters, such as [embed_tokens, lm_head], for new tokens"
    )
    quantize: Literal["nf4"] | None = Field(
        None, description="nf4: the model's own linear layers in 4 bits, by bitsandbytes (QLoRA)"
    )


class ProfileSettings(Settings):
    """A trace by torch's profiler, in the run's folder as profile-rank*.json."""

    steps: tuple[int, int] = Field(description="the first and the last step of the trace, such as [3, 5]")

    @model_validator(mode="after")
    def _check_order(self) -> ProfileSettings:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps must be the first and the last one, from 1 on: got {list(self.steps)}")
        return self


class CheckpointSettings(Settings):
    """Interval and number of checkpoints; one is always written at the end and on Ctrl-C."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of the newest are kept")
    asynchronous: bool = Field(True, description="steps continue while a checkpoint is checksummed and flushed to disk")


class ParallelSettings(Settings):
    """Layout of several processes, started by torchrun; ignored by a single process."""

    mode: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="ddp: whole copies; fsdp2: parameters and optimizer sharded"
    )
    replicas: int = Field(
        1, ge=1, description="fsdp2: copies of the sharded model, such as one per node; each is sharded separately"
    )
    context: int = Field(1, ge=1, description="processes that share each sequence, for sequences too long for one GPU")
    timeout_s: float = Field(600.0, gt=0, description="seconds; a collective that waits longer ends the run")

    @model_validator(mode="after")
    def _check_replicas(self) -> ParallelSettings:
        if self.replicas > 1 and self.mode != "fsdp2":
            raise ValueError("replicas needs mode fsdp2: with ddp every process has a copy")
        return self

    def check_count(self, processes: int) -> None:
        """Raises ConfigError if the settings do not divide this number of processes."""
        for name, size in (("replicas", self.replicas if processes > 1 else 1), ("context", self.context)):
            if processes % size:
                raise ConfigError(f"parallel.{name} must divide the {processes} processes: got {size}")
