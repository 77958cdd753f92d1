"""The settings of ``llmrl sft`` and ``llmrl grpo``; no torch: config errors are reported before it is imported."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llmrl.errors import ConfigError
from llmrl.loading import load_function
from llmrl.objectives.llm.settings import PRESETS, GRPOSettings
from llmrl.settings import Settings
from llmrl.train.adapter_files import disagreements, lora_settings, start_adapter
from llmrl.train.machine_settings import (
    CheckpointSettings,
    LoraSettings,
    MemorySettings,
    ModelOptions,
    OptimSettings,
    ParallelSettings,
    ProfileSettings,
)
from llmrl.train.rollout_settings import RolloutSettings
from llmrl.train.setting_types import AlgorithmName, EnvName, FormatName, FunctionName, TemplateText, ToolName
from llmrl.train.unused_settings import settings_without_effect


class TinyModelSettings(Settings):
    """A random model and a byte-level BPE tokenizer, created in memory; the embedded tasks train it."""

    architecture: Literal["qwen2", "qwen3", "llama", "mistral", "gpt2", "qwen2_vl"] = Field(
        "qwen2", description="family of the layers; qwen2_vl reads images"
    )
    hidden_size: int = Field(160, ge=16, description="width")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(5, ge=1, description="attention heads; vllm on a CPU needs hidden_size / heads to be 32 or 64")


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


class RewardSettings(Settings):
    """One reward of several: exactly one of ``fn``, ``judge``, ``reward_model`` and ``code``, and its weight."""

    fn: FunctionName | None = Field(None, description="a plain function, such as my_pkg.rewards:exact")
    judge: dict[str, Any] | None = Field(None, description="a model behind a URL: the arguments of JudgeReward")
    reward_model: dict[str, Any] | None = Field(None, description="the arguments of RewardModelScorer.load")
    code: dict[str, Any] | None = Field(None, description="tests in a sandbox: the arguments of CodeReward")
    weight: float = Field(1.0, allow_inf_nan=False, description="what its values are multiplied by; 0: only reported")
    name: str | None = Field(None, pattern=r"^[\w.-]+$", description="of its metric; null: the function's")
    deadline_s: float | None = Field(
        None, gt=0, description="seconds for one batch; null: env.reward_deadline_s for fn"
    )
    retries: int | None = Field(None, ge=0, description="null: env.retries")
    concurrency: int | None = Field(None, ge=1, description="rows that are scored at a time")
    answer_key: str | None = Field(None, description="column of the reference; null: answer")
    batched: bool | None = Field(None, description="true: called once, with lists of all rows")
    style: Literal["llmrl", "trl"] | None = Field(
        None, description="trl: called as TRL calls it; null: if it has a parameter completions or completion_ids"
    )
    process: bool | None = Field(
        None, description="run fn in a separate process, which can be killed; null: unless the function is llmrl's"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, data: object) -> object:
        return {"fn": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> RewardSettings:
        kinds = ("fn", "judge", "reward_model", "code")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) == 1:
            return self
        raise ValueError(f"must have exactly one of {', '.join(kinds)}: got {' and '.join(given) or 'none of them'}")


class AgentSettings(Settings):
    """A program of the user's that calls the policy by an OpenAI-compatible API: either ``run`` or ``command``."""

    run: FunctionName | None = Field(
        None,
        description="a function or coroutine function, such as my_agent:run; called with base URL, key and row, it "
        "returns the reward, or a mapping with reward and other numbers",
    )
    command: list[str] | None = Field(
        None,
        min_length=1,
        description="a program: the row is its input as JSON, OPENAI_BASE_URL and OPENAI_API_KEY are set, the last "
        "line that it prints is the result",
    )
    deadline_s: float = Field(600.0, gt=0, description="seconds that a rollout may take, with its retries")
    process: bool = Field(False, description="run the function in a process of its own: for code that blocks")
    train: Literal["main", "all", "longest"] = Field(
        "main",
        description="calls that are trained: main, of the first conversation; all, also of sub-agents and edited "
        "histories; longest, of the conversation with the most sampled tokens",
    )

    @property
    def label(self) -> str:
        return self.run or shlex.join(self.command or ())

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, data: object) -> object:
        if isinstance(data, str):
            words = shlex.split(data)
            return {"run": data} if len(words) == 1 and ":" in data else {"command": words}
        return {"command": data} if isinstance(data, list) else data

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> AgentSettings:
        if (self.run is None) == (self.command is None):
            raise ValueError(f"must have either run or command: got {'both' if self.run else 'neither'}")
        if self.process and self.run is None:
            raise ValueError("process is for run: a command has a process of its own")
        return self


class EnvSettings(Settings):
    """Prompts, tools, user and rewards."""

    NEEDS_REWARD: ClassVar[bool] = True  # False: without any, every answer has the reward 0
    name: EnvName = Field(
        "chat",
        description="sums, big_sums, colours: embedded tasks; gsm8k, math, countdown, ifeval: with their prompts and "
        "rewards; chat: your own dataset and reward; my_pkg.envs:MyEnv: your own class",
    )
    options: dict[str, Any] = Field({}, description="arguments of your own environment, by name")
    agent: AgentSettings | None = Field(
        None,
        description="an agent of your own, called with each row of the data, in place of prompt, tools, user and "
        "reward: my_agent:run, or a command line; needs the extra serve",
    )
    dataset: str | None = Field(None, description="a .jsonl, .json, .parquet or .csv file, or a hub name")
    config: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a folder, a hub dataset or an embedded task")
    prompt_column: str | None = Field(None, description="column of the prompt, if it has another name")
    answer_column: str | None = Field(None, description="column of the reference answer, if it has another name")
    system_prompt: str | None = Field(None, description="first message of every conversation")
    reward: FunctionName | None = Field(
        None, description="a plain function, such as my_pkg.rewards:exact; called with completion, answer"
    )
    rewards: list[RewardSettings] | None = Field(
        None,
        min_length=1,
        description="several, added up; each {fn: NAME, weight: 1.0}, or judge, reward_model or code in place of fn",
    )
    reward_deadline_s: float = Field(20.0, gt=0, description="seconds that the rewards of one batch may take")
    tools: list[ToolName] = Field(
        [],
        description="tools the model can call: calculator, python, my_pkg.tools:lookup, {python: {limits: {cpu_s: 9}}}",
    )
    tool_format: FormatName = Field(
        "auto",
        description="format of tool calls: hermes, llama, mistral, deepseek, harmony, function, tagged, python, or "
        "my_pkg.calls:MyFormat; auto: as the chat template teaches it",
    )
    tool_timeout_s: float = Field(10.0, gt=0, description="seconds that one call may take")
    declare_tools: bool | None = Field(
        None, description="describe the tools in prompts; null: if the chat template teaches the format"
    )
    user: FunctionName | None = Field(
        None, description="replies between turns, such as my_pkg.users:reply; called with the messages; None ends it"
    )
    max_turns: int = Field(1, ge=1, description="answers of the policy per conversation; tools and a user need 2")
    retries: int = Field(2, ge=0, description="how often a failed conversation, reward or user reply is retried")
    on_rewrite: Literal["error", "new_record"] = Field(
        "error",
        description="if a template rewrites earlier turns of a conversation: stop, or train each turn that does not "
        "continue the one before as a separate record",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt")
    too_long: Literal["error", "drop"] = Field("error", description="longer prompts end the run, or are dropped")
    max_conversation_tokens: int | None = Field(
        None,
        ge=2,
        description="a conversation that leaves no room for an answer ends as truncated, without the message that did "
        "not fit; null: what the model and the engine can hold",
    )

    @property
    def several_turns(self) -> bool:
        """True if a conversation may have several answers of the policy."""
        return self.max_turns > 1 or self.agent is not None

    @property
    def several_records(self) -> bool:
        """True if a conversation may be several training records."""
        return self.max_records > 1 or self.agent is not None

    @property
    def max_records(self) -> int:
        """The largest number of training records of one conversation."""
        return self.max_turns if self.on_rewrite == "new_record" else 1

    @property
    def _has_reward(self) -> bool:
        return self.reward is not None or self.rewards is not None

    @property
    def label(self) -> str:
        """The name in metrics: that of the environment, without its module; of ``chat``, that of the dataset."""
        if self.name != "chat" or self.dataset is None:
            return self.name.rpartition(":")[2]
        name = re.sub(r"\.(jsonl|json|parquet|csv)$", "", Path(self.dataset).name, flags=re.IGNORECASE)
        return re.sub(r"[^\w.-]+", "-", name).strip("-") or self.name

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> EnvSettings:
        if self.reward is not None and self.rewards is not None:
            raise ValueError("env has reward and rewards: put the single one into the list")
        if self.agent is not None:
            self._check_agent()
        has_reward = self._has_reward or self.agent is not None or not self.NEEDS_REWARD
        given = {"dataset": self.dataset is not None, "reward": has_reward}
        if self.name == "chat" and not all(given.values()):
            raise ValueError(f"env {self.name} needs {' and '.join(key for key in given if not given[key])}")
        for column in ("prompt_column", "answer_column"):
            if self.name not in ("chat", "sums", "big_sums", "colours") and getattr(self, column) is not None:
                raise ValueError(f"env.{column} is for data of your own: env {self.name} knows its columns")
        if self.options and ":" not in self.name:
            raise ValueError(f"env.options is for an environment of your own: {self.name} takes none")
        for name, value in (("tools", self.tools), ("user", self.user)):
            if value and self.max_turns < 2:
                raise ValueError(f"env.{name} needs max_turns of at least 2, to continue after a reply: got 1")
        return self

    def _check_agent(self) -> None:
        """Raises ValueError for settings that an agent replaces."""
        if ":" in self.name:
            raise ValueError(f"env.agent gets rows, not an environment: name {self.name} is one; set env.dataset")
        read = ("name", "agent", "dataset", "config", "split", "retries", "max_conversation_tokens")
        fields = type(self).model_fields
        given = [name for name in fields if name not in read and getattr(self, name) != fields[name].default]
        if given:
            raise ValueError(f"env.agent does this itself: leave out {', '.join(f'env.{name}' for name in given)}")

    @model_validator(mode="after")
    def _names_can_be_loaded(self) -> EnvSettings:
        """Loads every name that the user gave, and reports each fault at its setting; last: it runs user code."""
        from llmrl.tools.load import check_tool

        functions = {("reward",): self.reward, ("user",): self.user}
        functions |= {("rewards", n, "fn"): reward.fn for n, reward in enumerate(self.rewards or ())}
        checks = {at: partial(load_function, name, what="name") for at, name in functions.items() if name}
        if self.agent is not None and self.agent.run is not None:
            from llmrl.endpoint.agents import Agent

            checks["agent",] = partial(Agent, self.agent.run)
        for number, tool in enumerate(self.tools):
            name, options = (tool, None) if isinstance(tool, str) else next(iter(tool.items()))
            checks["tools", number] = partial(check_tool, name, options)
        if ":" in self.name:  # imported here: these two import torch
            from llmrl.train.environments import check_env

            has_reward = self._has_reward or not self.NEEDS_REWARD
            given = {"has_dataset": self.dataset is not None, "has_reward": has_reward}
            checks["name",] = partial(check_env, self.name, self.options, **given)
        if ":" in self.tool_format:
            from llmrl.envs.llm.tool_calls import call_format

            checks["tool_format",] = partial(call_format, self.tool_format)
        faults = []
        for at, check in checks.items():
            try:
                check()
            except ConfigError as error:
                fault = PydanticCustomError("value_error", "{text}", {"text": str(error).partition(": ")[2]})
                faults.append(InitErrorDetails(type=fault, loc=at, input=None))
        if faults:
            raise ValidationError.from_exception_data(type(self).__name__, faults)
        return self


class EvalSettings(Settings):
    """Evaluation on what is never trained on: greedy accuracy on problems, or the loss on rows."""

    dataset: str | None = Field(
        None,
        description="a file or hub name; null: the environment's own held-out split. Without an env its rows are like "
        "those of data.path, and their loss is measured",
    )
    split: str = Field("test", description="the split that is measured")
    rows: int | None = Field(
        500, ge=1, description="only the first rows, this many; null: all, the default of a dataset without an env"
    )
    every: int = Field(0, ge=0, description="steps between evaluations; 0: before and after only")
    batch_size: int = Field(512, ge=1, description="conversations generated at the same time")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")


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
        16384, ge=1, description="padded tokens per forward pass; changes memory, never the result"
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="sequences packed end to end, not padded; auto: if it saves a fifth and the model can"
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
            if changed is None or ".".join(path) in changed
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


class GRPOConfig(ModelSource):
    """Group-relative policy optimisation. Defaults are those of the literature; a run prints the resolved values.

    A recipe with another algorithm subclasses it: ``COMMAND`` is its name, ``ALGORITHM`` the class that runs without
    ``algorithm``, ``SECTION`` the field with the settings of that class, and ``GROUPS`` False if it has no groups.
    """

    COMMAND: ClassVar[str] = "grpo"
    ALGORITHM: ClassVar[str] = "llmrl.objectives.llm.algorithm:Algorithm"
    SECTION: ClassVar[str | None] = None
    GROUPS: ClassVar[bool] = True
    FIXED: ClassVar[tuple[str, ...]] = (
        *ModelSource.FIXED,
        *("group_size", "env.name", "env.options", "env.dataset", "env.config", "env.split"),
    )

    algo: Literal[*PRESETS] = Field(
        "grpo", description="preset of advantage, ratio, aggregation and KL; the grpo section overrides it"
    )
    algorithm: AlgorithmName | None = Field(
        None,
        description="a class of your own, module:name, or {module:name: {its settings}}; null: what algo and grpo say",
    )
    env: EnvSettings
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
        if self.env.agent is not None:
            self._check_agent()
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

    def _check_agent(self) -> None:
        """Raises ValueError for settings that do nothing for an agent."""
        if self.overlong_buffer:
            raise ValueError("overlong_buffer is for one answer per prompt: env.agent may subtract it from its reward")
        for name in ("dataset", "every"):
            if getattr(self.eval, name):
                raise ValueError(f"eval.{name}: an agent is not measured on other rows; leave it out")

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
        if advantage["scale"] != "raw":  # raw rewards have no group baseline: equal ones train too
            advantage["on_zero_variance"] = "keep" if self.zero_variance == "keep" else "drop"
        if own.multi_objective_aggregation == "normalize_then_sum":
            if self.env.rewards is None or self.env.max_turns > 1:
                raise ConfigError(
                    "grpo.multi_objective_aggregation: normalize_then_sum needs env.rewards, a list, and one turn "
                    f"(env.max_turns 1): got {'none' if self.env.rewards is None else len(self.env.rewards)} and "
                    f"{self.env.max_turns} turns."
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


class SFTData(Settings):
    """Conversations: rows with ``messages``, with a prompt and an answer, or in another public format."""

    path: str = Field(
        description="a file, a pattern, a folder or a hub name (docs/data.md); or embedded: sums, big_sums, colours"
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a folder, a hub dataset or an embedded task")
    rows: int | None = Field(None, ge=1, description="only the first conversations, this many; null: all")
    prompt_column: str | None = Field(None, description="column of the prompt, if it has another name")
    completion_column: str | None = Field(None, description="column of the answer, if it has another name")
    system_prompt: str | None = Field(None, description="system message of conversations without one")
    train_on: Literal["assistant", "last"] = Field(
        "assistant", description="assistant: every turn of the assistant; last: the last one only"
    )


class StopSettings(Settings):
    """Early stopping, once the score on a separate split is high enough."""

    at_least: float = Field(description="mean score at which training ends")
    split: str = Field("validation", description="split that is neither trained on nor reported")
    rows: int = Field(200, ge=1, description="how many of them")
    every: int = Field(10, ge=1, description="steps between evaluations")
    after: int = Field(0, ge=0, description="first step that is evaluated")


class SFTConfig(ModelSource):
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens that the assistant wrote."""

    FIXED: ClassVar[tuple[str, ...]] = (*ModelSource.FIXED, "data", "max_length", "too_long")
    measures_rows: ClassVar[bool] = False  # True: rows like the trained ones are measured without eval.dataset too

    data: SFTData
    max_length: int = Field(2048, ge=2, description="longest conversation, in tokens")
    too_long: Literal["error", "split", "truncate"] = Field(
        "error", description="longer conversations: an error; split into pieces; or truncated"
    )
    batch_size: int = Field(64, ge=1, description="conversations per optimizer step, over all processes")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(None, ge=1, description="optimizer steps; null: as many as the epochs have")
    env: EnvSettings | None = Field(None, description="the task that is evaluated; null: the loss on eval.dataset")
    eval: EvalSettings = EvalSettings()
    stop: StopSettings | None = Field(None, description="early stopping; null: none")
    samples: int = Field(2, ge=0, description="conversations printed with their trained tokens marked")

    @property
    def row_length(self) -> int:
        """The largest number of tokens in a row of a batch."""
        return self.max_length

    @property
    def loss_in_words(self) -> str:
        return "-log p, sum over the assistant's tokens / tokens of the step"

    @property
    def stop_eval(self) -> EvalSettings | None:
        """The evaluation that decides when to stop; None without ``stop``."""
        return self.stop and self.eval.model_copy(update={"split": self.stop.split, "rows": self.stop.rows})

    @model_validator(mode="before")
    @classmethod
    def _measure_all_held_out_rows(cls, data: Any) -> Any:
        """Without env all rows of ``eval.dataset`` are measured, unless ``eval.rows`` is given."""
        section = data.get("eval") if isinstance(data, dict) and data.get("env") is None else None
        if isinstance(section, dict) and section.get("dataset") is not None:
            data = data | {"eval": {"rows": None} | section}
        return data

    @model_validator(mode="after")
    def _stopping_needs_a_measure(self) -> SFTConfig:
        if self.env is not None and self.env.agent is not None:
            raise ValueError("env.agent is for recipes that sample, such as grpo: here leave it out")
        if self.stop is not None and self.env is None:
            raise ValueError("stop needs env: a task that is measured to decide when to stop")
        return self
