"""The settings of the recipes that run the loop of ``llmrl grpo`` with another algorithm; no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from llmrl.objectives.llm.settings import RejectionSettings
from llmrl.objectives.llm.teacher_settings import DistillSettings
from llmrl.settings import Settings
from llmrl.train.settings.environment import EnvSettings, SourceSettings
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.machine import OptimSettings


class PPOSettings(Settings):
    """The critic, and the advantages from its values."""

    critic: str | None = Field(
        None,
        description="the model that the critic starts from, with the policy's tokenizer, such as a run of llmrl "
        "reward; null: the model that the policy starts from, with a new output",
    )
    critic_optim: OptimSettings = Field(OptimSettings(lr=1e-5), description="the critic's optimizer, as optim")
    critic_warmup: int = Field(0, ge=0, description="steps at the start in which the critic alone is trained")
    gamma: float = Field(1.0, ge=0, le=1, description="discount of the reward per trained token")
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        description="decay of GAE per trained token: 1 compares with the return, 0 with the next token's value",
        json_schema_extra={"also": ["lambda"]},
    )
    bootstrap: bool = Field(
        False,
        description="answers cut off at sampling.max_tokens go on with the critic's value; else they end",
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="how far a value may move from that before the step's updates; null: no limit"
    )


class PPOConfig(GRPOConfig):
    """PPO with a critic: ``algo`` and the ``grpo`` section choose ratio, aggregation and KL; advantages are GAE."""

    COMMAND: ClassVar[str] = "ppo"
    ALGORITHM: ClassVar[str] = "llmrl.objectives.llm.ppo:PPO"
    SECTION: ClassVar[str | None] = "ppo"
    GROUPS: ClassVar[bool] = False
    FIXED: ClassVar[tuple[str, ...]] = (*GRPOConfig.FIXED, "ppo.critic")

    group_size: int = Field(
        1, ge=1, description="completions per prompt", json_schema_extra={"also": ["num_generations", "n"]}
    )
    ppo: PPOSettings = PPOSettings()

    @model_validator(mode="after")
    def _critic_can_be_trained(self) -> PPOConfig:
        if self.parallel.context > 1:
            raise ValueError("parallel.context is for models that generate: a critic reads whole sequences")
        if self.grpo.masking_strategy == "generic":
            raise ValueError("grpo.masking_strategy: generic trains tokens without a value; leave it out")
        if self.ppo.critic_warmup >= self.steps:
            raise ValueError(
                f"ppo.critic_warmup must leave steps to the policy: got {self.ppo.critic_warmup} of {self.steps}"
            )
        return self


class RejectionConfig(GRPOConfig):
    """Rejection sampling: the best answers to each prompt are learned as examples."""

    COMMAND: ClassVar[str] = "rejection"
    ALGORITHM: ClassVar[str] = "llmrl.objectives.llm.rejection:RejectionSampling"
    SECTION: ClassVar[str | None] = "rejection"

    rejection: RejectionSettings = RejectionSettings()

    @model_validator(mode="after")
    def _answers_can_be_chosen(self) -> RejectionConfig:
        if self.rejection.keep > self.group_size:
            raise ValueError(f"rejection.keep must be at most group_size {self.group_size}: got {self.rejection.keep}")
        if self.env.several_records:
            given = "agent" if self.env.agent else "on_rewrite new_record"
            raise ValueError(f"env.{given} is not for rejection: an answer must be one record")
        return self


class UnscoredSourceSettings(SourceSettings):
    """A source of prompts, tools and user; rewards are measured if there are any."""

    NEEDS_REWARD: ClassVar[bool] = False


class UnscoredEnvSettings(EnvSettings):
    """Prompts, tools and user; rewards are measured if there are any."""

    NEEDS_REWARD: ClassVar[bool] = False
    mix: list[UnscoredSourceSettings] | None = EnvSettings.model_fields["mix"]


class DistillConfig(GRPOConfig):
    """On-policy distillation: answers of the student, each of its tokens compared with what a teacher would write."""

    COMMAND: ClassVar[str] = "distill"
    ALGORITHM: ClassVar[str] = "llmrl.objectives.llm.distill:Distill"
    SECTION: ClassVar[str] = "distill"
    GROUPS: ClassVar[bool] = False
    TEACHER_SECTION: ClassVar[str] = "distill"

    env: UnscoredEnvSettings
    group_size: int = Field(
        1, ge=1, description="answers per prompt", json_schema_extra={"also": ["num_generations", "n"]}
    )
    distill: DistillSettings

    @property
    def teacher(self) -> DistillSettings:
        return self.distill

    def with_teacher(self, source: str) -> DistillConfig:
        return self.model_copy(update={"distill": self.distill.at(source)})

    @model_validator(mode="after")
    def _check_distillation(self) -> DistillConfig:
        if self.grpo.teacher is not None:
            raise ValueError("grpo.teacher: llmrl distill has its teacher in distill.teacher; leave it out")
        if self.distill.weight_reward and self.group_size < 2:
            raise ValueError("distill.weight_reward compares the rewards of a group: set group_size to at least 2")
        return self
