"""The settings of ``llmrl grpo``. The loop that reads them is `llmrl.recipes.grpo`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from llmrl.train.settings import EnvSettings, EvalSettings, ModelSource, SamplingSettings, Settings

__all__ = ["AlgorithmSettings", "GRPOConfig", "RolloutSettings"]


class AlgorithmSettings(Settings):
    """Settings of `GRPOSettings` by the same names, and the advantage's ``scale``; null: what ``algo`` chose."""

    clip: tuple[float, float] | None = Field(None, description="how far below and above 1 the ratio may go")
    scale: Literal["group", "batch", "none"] | None = Field(None, description="what divides the centred reward")
    aggregation: Literal["token", "seq-mean", "dr_grpo"] | None = Field(
        None, description="how token losses are averaged", json_schema_extra={"also": ["loss"]}
    )
    kl: float = Field(0.0, ge=0, description="weight of the divergence from the starting model, kept as reference")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    kl_inference: float = Field(0.0, ge=0, description="weight of the divergence from the engine that sampled")
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k3-weighted"] | None = Field(
        None, description="how a divergence is estimated from sampled tokens"
    )
    proximal: Literal["behaviour", "detach", "recomputed"] | None = Field(
        None,
        description="what the ratio compares with: the engine's log-probs, the current ones, or those that the trainer "
        "computes before its first update; null: detach with one update per step, else whichever costs no accuracy",
    )
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of a token with a negative advantage")
    correction: Literal["none", "tis", "mask", "seq-tis", "seq-mask", "geo-mask"] | None = Field(
        None, description="weight for what engine and trainer disagree on"
    )
    correction_cap: float | None = Field(None, gt=0, description="where the weight is cut; null: 2")
    correction_band: tuple[float, float] | None = Field(None, description="what mask and geo-mask keep")
    correction_veto: tuple[float, float] | None = Field(
        None, description="sequences with any token's weight outside are left out, [1e-4, 100] say"
    )

    @model_validator(mode="before")
    @classmethod
    def _rename_loss(cls, section: Any) -> Any:
        """Reads files of runs from when ``aggregation`` was called ``loss``."""
        if isinstance(section, dict) and "loss" in section and "aggregation" not in section:
            section = {"aggregation" if name == "loss" else name: value for name, value in section.items()}
        return section


class RolloutSettings(Settings):
    """The engine that samples, and the number of versions it may be behind the trainer."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="transformers: with the very weights that are trained; vllm: faster, with a copy"
    )
    own_process: bool | None = Field(
        None,
        description="vllm in a process of its own, where every conversation asks by itself; null: where max_staleness, "
        "concurrency or several processes ask for it",
    )
    max_staleness: int = Field(
        0, ge=0, le=1, description="1: the next rollouts are sampled during the update, one version behind; needs vllm"
    )
    concurrency: int | None = Field(
        None, ge=1, description="max concurrent conversations; null: all advance in lockstep"
    )
    kv_cache_gb: float | None = Field(
        None, gt=0, description="vllm's memory for keys and values; null: 1 GB on a CPU, what is free on a GPU"
    )
    probe_bound: float | None = Field(
        None,
        gt=0,
        description="vllm: mean |log-prob difference| to the trainer on fixed sequences that ends the run; null: 1e-3, "
        "in bfloat16 0.1",
    )

    @model_validator(mode="after")
    def _check_overlap(self) -> RolloutSettings:
        if self.max_staleness and self.engine != "vllm":
            raise ValueError("max_staleness 1 needs engine vllm: Transformers samples with the weights being trained")
        if self.max_staleness and self.own_process is False:
            raise ValueError("max_staleness 1 needs own_process: in this process nothing overlaps")
        return self


class GRPOConfig(ModelSource):
    """Group-relative policy optimisation. The defaults are those of the literature; a run prints what they become."""

    FIXED: ClassVar[tuple[str, ...]] = (
        *ModelSource.FIXED,
        *("group_size", "env.name", "env.options", "env.dataset", "env.config", "env.split"),
    )

    algo: Literal[
        *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "max_rl", "rloo", "reinforce", "reinforce++"),
        "reinforce++-baseline",
    ] = Field("grpo", description="preset of the four choices below")
    env: EnvSettings
    steps: int = Field(200, ge=1, description="rollout and update rounds")
    prompts_per_step: int = Field(32, ge=1, description="prompts per step, over all processes")
    group_size: int = Field(
        8,
        description="completions per prompt; their mean is the baseline, so one is not a group",
        json_schema_extra={"also": ["num_generations", "n"]},
    )
    min_group_size: int | None = Field(
        None, ge=2, description="scored completions below which a group is dropped; null: half of group_size"
    )
    zero_variance: Literal["drop", "keep", "refill"] = Field(
        "drop",
        description="groups of equal rewards: left out of the step, counted in its mean, or replaced by others",
    )
    refill_rounds: int = Field(
        3, ge=1, description="with refill, how often more rollouts are collected for a step before it is taken as it is"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="the last so many of sampling.max_tokens cost reward, up to 1 at the limit; 0: none do"
    )
    truncated: Literal["train", "mask"] = Field(
        "train", description="answers that ran into sampling.max_tokens: trained like others, or left out of the loss"
    )
    updates_per_step: int = Field(
        1, ge=1, description="optimizer updates on the rollouts of one step, each on its own part"
    )
    max_failed: float = Field(0.5, ge=0, le=1, description="share of failed rollouts in a step that ends the run")
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    grpo: AlgorithmSettings = AlgorithmSettings()
    eval: EvalSettings = EvalSettings()
    samples: int = Field(2, ge=0, description="conversations printed at the end with their trained tokens marked")

    @model_validator(mode="after")
    def _check_group(self) -> GRPOConfig:
        if self.group_size < 2:
            raise ValueError(
                f"group_size: a group of {self.group_size} has no baseline to compare with; use at least 2, 8 is common"
            )
        if self.overlong_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is more than sampling.max_tokens {self.sampling.max_tokens}"
            )
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size {self.min_group_size} is more than group_size {self.group_size}")
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} must divide prompts_per_step {self.prompts_per_step}"
            )
        return self
