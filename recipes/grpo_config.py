"""What ``llmrl grpo`` can be told. The loop that reads it is `llmrl.recipes.grpo`."""

from __future__ import annotations

from typing import Literal

from llmrl.recipes.settings import EnvSettings, EvalSettings, ModelSource, SamplingSettings, Settings
from pydantic import Field, model_validator

__all__ = ["AlgorithmSettings", "GRPOConfig"]


class AlgorithmSettings(Settings):
    """The four choices that make an algorithm; what ``algo`` chose stands unless it is said otherwise here."""

    clip: tuple[float, float] | None = Field(None, description="how far below and above 1 the ratio may go")
    scale: Literal["group", "batch", "none"] | None = Field(None, description="what divides the centred reward")
    loss: Literal["token", "seq-mean", "dr_grpo"] | None = Field(None, description="how token losses are averaged")
    kl: float = Field(0.0, ge=0, description="weight of the divergence from the starting model, kept as reference")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    correction: Literal["tis", "none"] | None = Field(
        None, description="weight for what engine and trainer disagree on"
    )


class GRPOConfig(ModelSource):
    """Group-relative policy optimisation. The defaults are those of the literature; a run prints what they resolve to."""

    algo: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce++"] = Field(
        "grpo", description="preset of the four choices below"
    )
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
    zero_variance: Literal["drop", "keep"] = Field(
        "drop", description="groups whose rewards are all equal: left out of the step, or counted in its mean"
    )
    updates_per_step: int = Field(
        1, ge=1, description="optimizer updates on the rollouts of one step, each on its own part"
    )
    max_failed: float = Field(0.5, ge=0, le=1, description="share of failed rollouts in a step that ends the run")
    sampling: SamplingSettings = SamplingSettings()
    grpo: AlgorithmSettings = AlgorithmSettings()
    eval: EvalSettings = EvalSettings()
    samples: int = Field(2, ge=0, description="conversations printed at the end with their trained tokens marked")

    @model_validator(mode="after")
    def _check_group(self) -> GRPOConfig:
        if self.group_size < 2:
            raise ValueError(
                f"group_size: a group of {self.group_size} has no baseline to compare with; use at least 2, 8 is common"
            )
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size {self.min_group_size} is more than group_size {self.group_size}")
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} must divide prompts_per_step {self.prompts_per_step}"
            )
        return self
