"""The settings of ``llmrl grpo``, which recipes with other algorithms extend."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from llmrl.errors import ConfigError
from llmrl.objectives.llm.presets import PRESETS
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.objectives.llm.teacher_settings import DivergenceSettings
from llmrl.settings import Settings
from llmrl.train.settings.curriculum import CurriculumSettings
from llmrl.train.settings.environment import EnvSettings, EvalSettings
from llmrl.train.settings.model import ModelSource
from llmrl.train.settings.rollout import RolloutSettings
from llmrl.train.settings.types import AlgorithmName


class SamplingSettings(Settings):
    """Sampling during rollouts; evaluation is greedy."""

    max_tokens: int = Field(
        1024, ge=1, description="longest completion, in tokens", json_schema_extra={"also": ["max_new_tokens"]}
    )
    temperature: float = Field(1.0, gt=0, description="of the softmax, in sampling and in training")
    top_p: float = Field(1.0, gt=0, le=1, description="1 keeps the whole distribution; less makes training off-policy")
    top_k: int = Field(0, ge=0, description="0 keeps the whole distribution; more makes training off-policy")

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """These settings as keyword arguments of a policy's generation."""
        return self.model_dump(exclude={"max_tokens"}) | {"max_new_tokens": self.max_tokens}


class GRPOConfig(ModelSource):
    """Group-relative policy optimisation. Defaults are those of the literature; a run prints the resolved values.

    A recipe with another algorithm subclasses it: ``COMMAND`` is its name, ``ALGORITHM`` the class that runs without
    ``algorithm``, ``SECTION`` the field with the settings of that class, ``GROUPS`` False if it has no groups, and
    ``TEACHER_SECTION`` where a teacher is named.
    """

    COMMAND: ClassVar[str] = "grpo"
    ALGORITHM: ClassVar[str] = "llmrl.objectives.llm.algorithm:Algorithm"
    SECTION: ClassVar[str | None] = None
    GROUPS: ClassVar[bool] = True
    TEACHER_SECTION: ClassVar[str] = "grpo.teacher"
    FIXED: ClassVar[tuple[str, ...]] = (
        *ModelSource.FIXED,
        *("group_size", "env.name", "env.options", "env.dataset", "env.config", "env.split", "env.mix", "curriculum"),
    )

    algo: Literal[*PRESETS] = Field(
        "grpo", description="preset of advantage, ratio, aggregation and KL; the grpo section overrides it"
    )
    algorithm: AlgorithmName | None = Field(
        None,
        description="a class of your own, module:name, or {module:name: {its settings}}; null: what algo and grpo say",
    )
    env: EnvSettings
    curriculum: CurriculumSettings | None = Field(
        None, description="draw prompts by the rewards of their last groups; {}: with the default pools; null: equally"
    )
    steps: int = Field(200, ge=1, description="rollout and update rounds")
    prompts_per_step: int = Field(32, ge=1, description="prompts per step, over all processes")
    group_size: int = Field(
        8,
        ge=1,
        description="completions per prompt; their mean is the baseline, so one is not a group",
        json_schema_extra={"also": ["num_generations", "n"]},
    )
    min_group_size: int | None = Field(
        None, ge=2, description="scored completions below which a group is dropped; null: half of group_size"
    )
    zero_variance: Literal["drop", "keep", "refill"] = Field(
        "drop",
        description="groups of equal rewards: left out of the step, kept in its mean, or replaced by others",
    )
    min_spread: float = Field(
        0.0, ge=0, description="rewards of a group that differ by at most this are equal ones for zero_variance"
    )
    refill_rounds: int = Field(
        3,
        ge=1,
        description="with refill, at most this many extra rounds of rollouts per step; then it trains what it has",
    )
    overlong_buffer: int = Field(
        0, ge=0, description="tokens before sampling.max_tokens that cost reward, up to 1 at the limit; 0: none"
    )
    truncated: Literal["train", "mask"] = Field(
        "train", description="answers cut off at sampling.max_tokens: trained like others, or left out of the loss"
    )
    updates_per_step: int = Field(
        1, ge=1, description="optimizer updates on the rollouts of one step, each on a different part"
    )
    max_failed: float = Field(0.5, ge=0, le=1, description="share of failed rollouts in a step that ends the run")
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    grpo: GRPOSettings = GRPOSettings()
    eval: EvalSettings = EvalSettings()
    samples: int = Field(2, ge=0, description="conversations printed at the end with their trained tokens marked")
    token_records: int = Field(
        16, ge=0, description="conversations per step that rollouts/*.parquet stores token by token; whole groups first"
    )

    @model_validator(mode="after")
    def _check_group(self) -> GRPOConfig:
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
        if self.rollout.options.get("enable_lora") and (self.lora is None or self.lora.quantize):
            why = "with lora.quantize, which changes the weights below adapters" if self.lora else "without lora"
            raise ValueError(
                f"rollout.options: enable_lora cannot be used {why}: such an engine takes adapters only; leave it out, "
                "and all weights are sent"
            )
        if self.rollout.options.get("enable_lora") and self.lora and self.lora.modules_to_save:
            raise ValueError(
                "rollout.options: enable_lora cannot be used with lora.modules_to_save, which vLLM does not read from "
                "adapters: leave it out, and all weights are sent"
            )
        if self.env.agent is not None and self.overlong_buffer:
            raise ValueError("overlong_buffer is for one answer per prompt: env.agent may subtract it from its reward")
        if self.env.is_mix and self.eval.dataset is not None:
            raise ValueError("eval.dataset: a mix is measured by source: set eval_dataset in those of env.mix")
        if self.eval.sets and any(source.eval_dataset for source in self.env.mix or ()):
            raise ValueError("eval.sets are measured in place of the sources' problems: leave out their eval_dataset")
        if self.curriculum is not None and not all(task.is_scored for task in self.env.tasks):
            raise ValueError("curriculum draws prompts by their rewards: set env.reward, or leave it out")
        self._check_teacher()
        self.grpo_settings()
        needs_groups = self.GROUPS
        if self.algorithm is not None:
            if self.COMMAND != "grpo":
                raise ValueError(f"algorithm: llmrl {self.COMMAND} has one already; name another one with llmrl grpo")
            from llmrl.train.algorithms import load_algorithm  # imports torch

            needs_groups = load_algorithm(self.algorithm)[0].compares_groups
        if needs_groups and self.group_size < 2:
            raise ValueError(
                f"group_size: a group of {self.group_size} has no baseline to compare with; use at least 2, 8 is common"
            )
        return self

    @property
    def teacher(self) -> DivergenceSettings | None:
        """The teacher whose divergence from the policy is in the loss."""
        return self.grpo.teacher

    def with_teacher(self, source: str) -> Self:
        """These settings with another teacher."""
        return self.model_copy(update={"grpo": self.grpo.model_copy(update={"teacher": self.teacher.at(source)})})

    def _check_teacher(self) -> None:
        """Raises ValueError for a teacher that these settings cannot be trained with."""
        options, heat, section = self.teacher, self.sampling.temperature, self.TEACHER_SECTION
        if options is None:
            return
        if options.estimator == "sample" and options.temperature not in (None, heat):
            raise ValueError(
                f"{section}.temperature: estimator sample needs that of sampling, {heat}: got {options.temperature}"
            )
        if options.is_server and (options.temperature or heat) != 1:
            raise ValueError(
                f"{section}.{options.TEACHER}: a server scores at temperature 1: got {options.temperature or heat}; "
                f"set sampling.temperature or {section}.temperature to 1"
            )
        if options.is_base and self.lora is None:
            raise ValueError(
                f"{section}.{options.TEACHER}: base is the student without its adapters, and it has none: set lora, or "
                "name the model (./base for a folder of this name)"
            )
        if options.demonstration is not None and (self.env.agent is not None or self.env.several_records):
            given = "agent" if self.env.agent else "on_rewrite new_record"
            raise ValueError(f"{section}.demonstration is for one record per conversation: got env.{given}")
        if self.grpo.observation is not None and options.estimator != "sample":
            raise ValueError(
                f"grpo.observation is for {section}.estimator sample, or no teacher: got {options.estimator}"
            )
        if self.parallel.context > 1:
            raise ValueError(
                f"{section}: must run with parallel.context=1: got {self.parallel.context}; the teacher's scores are "
                "not split over ranks"
            )

    def _check_mix(self, advantage: dict[str, Any]) -> None:
        """Raises ConfigError for advantages that compare rewards of one source with those of another."""
        across = f"grpo.scale {advantage['scale']}" if advantage["scale"] == "batch" else ""
        across = across or (f"algo {self.algo}, which whitens over the step" if advantage.get("whiten") else "")
        across = across or ("ppo, which whitens over the step" if self.COMMAND == "ppo" else "")
        if across or self.grpo.multi_objective_aggregation == "normalize_then_sum":
            across = across or "grpo.multi_objective_aggregation normalize_then_sum"
            raise ConfigError(
                "env.mix: an advantage must be of its own group, because rewards of different sources are not "
                f"comparable: got {across}; use llmrl grpo with an algo such as grpo, dapo or rloo."
            )

    def grpo_settings(self, *, exact: bool = True) -> tuple[dict[str, Any], GRPOSettings]:
        """Keyword arguments for MCAdvantage and the settings of GRPOLoss: the ``grpo`` section, then the preset.

        ``exact``: the sampling log-probs equal the trainer's up to float32 rounding, and need not be recomputed.

        Raises  ConfigError for settings that contradict each other
        """
        preset, own = PRESETS[self.algo], self.grpo
        advantage = {**preset.advantage, "min_group_size": self.min_group_size}
        advantage["policy_version_key"] = None  # one draw is one group, even if several versions sampled it
        if own.scale is not None:
            advantage["scale"] = own.scale
        if self.env.several_records:  # the last record of a conversation has the reward; all get its advantage
            advantage["trajectory_return"] = "sum"
        if self.env.is_mix:
            self._check_mix(advantage)
        if advantage["scale"] != "raw":  # raw rewards have no group baseline: equal ones train too
            advantage["on_zero_variance"] = "keep" if self.zero_variance == "keep" else "drop"
            advantage["min_spread"] = self.min_spread
        if own.multi_objective_aggregation == "normalize_then_sum":
            if self.env.rewards is None or self.env.max_turns > 1:
                raise ConfigError(
                    "grpo.multi_objective_aggregation: normalize_then_sum needs env.rewards, a list, and one turn "
                    f"(env.max_turns 1): got {'none' if self.env.rewards is None else len(self.env.rewards)} and "
                    f"{self.env.max_turns} turns."
                )
            if self.min_spread:
                raise ConfigError(
                    "min_spread: is not supported with grpo.multi_objective_aggregation normalize_then_sum, which "
                    f"compares each reward alone: got {self.min_spread:g}; leave one out."
                )
            if advantage["scale"] in ("batch", "raw") or advantage.get("whiten"):
                raise ConfigError(
                    "grpo.multi_objective_aggregation: normalize_then_sum normalises each reward in its group, then "
                    "the sum over the step: use a scale other than batch and raw, and an algo without whitening."
                )
        loss, chosen = own.over(preset.settings), {}
        if loss.aggregation == "none":
            raise ConfigError("grpo.aggregation: must give one number for the whole step: got 'none', one per token.")
        if own.proximal is None and loss.proximal == "detach" and loss.surrogate != "reinforce":  # which clips no ratio
            if self.rollout.max_staleness > 1:
                # Clip against the weights that sampled: otherwise each of several updates on rollouts of the same old
                # weights could move as far as the clip allows, all in the same direction.
                chosen["proximal"] = "behaviour"
            elif self.updates_per_step > 1:
                # The first update compares the weights with themselves; later ones need log-probs from before it: the
                # engine's if they equal the trainer's, else recomputed ones.
                chosen["proximal"] = "behaviour" if exact else "recomputed"
        if loss.aggregation == "dr_grpo" and loss.max_length is None:
            chosen["max_length"] = self.sampling.max_tokens
        if loss.top_entropy_quantile == 1:  # all tokens: nothing to find
            loss = loss.model_copy(update={"top_entropy_quantile": None})
        if loss.kl == 0:  # no reference is loaded for a weight of 0
            loss = loss.model_copy(update={"kl": None})
        return advantage, GRPOSettings(**chosen).over(loss).complete()
