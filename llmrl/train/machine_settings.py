"""The settings that choose memory, speed and optimizer for a machine; no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from llmrl.errors import ConfigError
from llmrl.train.setting_types import Settings


class OptimSettings(Settings):
    """AdamW."""

    name: Literal["adamw", "adamw_8bit", "adamw_offload"] = Field(
        "adamw", description="adamw_8bit: a quarter of its memory, by torchao; adamw_offload: in host memory"
    )
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


class MemorySettings(Settings):
    """Time for memory. None of these changes a result; ``--dry-run`` prints what a run needs."""

    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="decoder layers keep their input alone and compute again in the backward pass; auto: if a GPU "
        "would be too small otherwise",
    )
    offload: Literal["none", "activations", "parameters"] = Field(
        "none",
        description="what waits in host memory: what the backward pass needs; or, with parallel.mode fsdp2, weights, "
        "gradients and optimizer, which then computes there",
    )
    compile: bool = Field(False, description="decoder layers by torch.compile: slower to start, faster on a GPU")


class ModelOptions(Settings):
    """Arithmetic and kernels of the model."""

    attn_implementation: str | None = Field(
        None, description="sdpa, eager, flash_attention_2 or another name that transformers knows; null: its choice"
    )
    float32_head: bool = Field(
        False, description="the output layer in float32 even if the model is in bfloat16: exacter log-probs"
    )
    freeze_vision: bool = Field(True, description="the part of a model that reads images is not trained")
    router_aux_loss: float | None = Field(
        None,
        ge=0,
        description="mixtures of experts: weight of the loss that balances their load; null: the model's own, 0: none",
    )


class LoraSettings(Settings):
    """Low-rank adapters beside the model's linear layers: they alone are trained. Needs peft."""

    r: int = Field(16, ge=1, description="rank", json_schema_extra={"also": ["rank"]})
    alpha: float = Field(32.0, gt=0, description="an adapter's output is multiplied by alpha / r")
    rslora: bool = Field(False, description="by alpha / sqrt(r) instead")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what adapters read; supervised training only")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="layers that get one, [q_proj, v_proj] say; all-linear: all but the output layer"
    )
    quantize: Literal["nf4"] | None = Field(
        None, description="nf4: the model's own linear layers in 4 bits, by bitsandbytes (QLoRA)"
    )


class ProfileSettings(Settings):
    """A trace by torch's profiler, in the run's folder as profile-rank*.json."""

    steps: tuple[int, int] = Field(description="the first and the last step of the trace, [3, 5] say")

    @model_validator(mode="after")
    def _check_order(self) -> ProfileSettings:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps must be the first and the last one, from 1 on: got {list(self.steps)}")
        return self


class CheckpointSettings(Settings):
    """When checkpoints are written, besides at the end and on Ctrl-C, and how many are kept."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of the newest are kept")
    asynchronous: bool = Field(
        True, description="the next steps go on while a checkpoint is checksummed and flushed to the disk"
    )


class ParallelSettings(Settings):
    """Layout of several processes, started by torchrun. One process ignores it."""

    mode: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="ddp: whole copies; fsdp2: parameters and optimizer sharded"
    )
    replicas: int = Field(
        1, ge=1, description="fsdp2: copies of the sharded model, one per node say; sharding stays within each"
    )
    context: int = Field(
        1, ge=1, description="processes that each sequence is split over, for sequences too long for one GPU"
    )
    timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the run")

    @model_validator(mode="after")
    def _check_replicas(self) -> ParallelSettings:
        if self.replicas > 1 and self.mode != "fsdp2":
            raise ValueError("replicas needs mode fsdp2: with ddp every process has a copy")
        return self

    def check_count(self, processes: int) -> None:
        """Raises ConfigError if this number of processes cannot be laid out."""
        for name, size in (("replicas", self.replicas if processes > 1 else 1), ("context", self.context)):
            if processes % size:
                raise ConfigError(f"parallel.{name} must divide the {processes} processes: got {size}")
