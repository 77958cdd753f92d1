"""The settings of ``llmrl ppo``; no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from llmrl.settings import Settings
from llmrl.train.machine_settings import OptimSettings
from llmrl.train.settings import GRPOConfig


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
        if self.algorithm is not None:
            raise ValueError("algorithm: llmrl ppo has one already; name another one with llmrl grpo")
        if self.parallel.context > 1:
            raise ValueError("parallel.context is for models that generate: a critic reads whole sequences")
        if self.grpo.masking_strategy == "generic":
            raise ValueError("grpo.masking_strategy: generic trains tokens without a value; leave it out")
        if self.ppo.critic_warmup >= self.steps:
            raise ValueError(
                f"ppo.critic_warmup must leave steps to the policy: got {self.ppo.critic_warmup} of {self.steps}"
            )
        return self
