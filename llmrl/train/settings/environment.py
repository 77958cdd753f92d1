"""The task of a recipe: data, rewards, tools, an agent; and what is measured on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llmrl.errors import ConfigError
from llmrl.loading import load_function
from llmrl.settings import Settings
from llmrl.train.settings.types import EMBEDDED, EPISODES, GAMES, VERIFIERS, EnvName, FormatName, FunctionName, ToolName

_ALL = {"train": "all"}  # each branch of a trace is a row


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
    seats: list[str] | None = Field(
        None,
        min_length=1,
        description="of an agent that plays several, each named in X-Session-ID: those that are trained, whose rewards "
        "it returns by name",
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
        if self.run is not None and self.command is not None:
            raise ValueError("must have either run or command: got both")
        if self.process and self.run is None:
            raise ValueError("process is for run: a command has a process of its own")
        return self

    @property
    def is_named(self) -> bool:
        """False if the environment is played by an agent of its own."""
        return self.run is not None or self.command is not None


class TaskSettings(Settings):
    """Prompts, tools, user and rewards of one task."""

    NEEDS_REWARD: ClassVar[bool] = True  # False: without any, every answer has the reward 0
    name: EnvName = Field(
        "chat",
        description="sums, big_sums, colours, arithmetic: embedded tasks; gsm8k, math, countdown, ifeval, "
        "reasoning_gym: with their prompts and rewards; openenv, textarena, gem, text_env: environments with "
        "reset and step; verifiers: tasks of that package; chat: your own dataset and reward; my_pkg.envs:MyEnv: your "
        "own class",
    )
    options: dict[str, Any] = Field(
        {}, description="arguments of your own environment, of reasoning_gym, verifiers, or of one with reset and step"
    )
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
    def is_mix(self) -> bool:
        """True if the settings are those of several tasks."""
        return False

    @property
    def tasks(self) -> Sequence[TaskSettings]:
        """The tasks: of a mix, its sources."""
        return (self,)

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
    def _takes_options(self) -> bool:
        return ":" in self.name or self.name in ("reasoning_gym", VERIFIERS, *EPISODES)

    @property
    def _has_reward(self) -> bool:
        return self.reward is not None or self.rewards is not None

    @property
    def is_scored(self) -> bool:
        """True if there are rewards."""
        return self.name != "chat" or self._has_reward or self.agent is not None

    @property
    def label(self) -> str:
        """The name in metrics: that of the environment, without its module, of reasoning_gym with that of its task; of
        ``chat``, that of the dataset.
        """
        named = {"reasoning_gym": "task", VERIFIERS: "taskset"}.get(self.name)
        if named in self.options and self.dataset is None:
            given = self.options[named]
            given = given.get("id") if isinstance(given, Mapping) else given
            return re.sub(r"[^\w.-]+", "-", f"{self.name}.{given}")
        if self.name != "chat" or self.dataset is None:
            return self.name.rpartition(":")[2]
        name = re.sub(r"\.(jsonl|json|parquet|csv)$", "", Path(self.dataset).name, flags=re.IGNORECASE)
        return re.sub(r"[^\w.-]+", "-", name).strip("-") or self.name

    @property
    def plays_itself(self) -> bool:
        """True if rollouts are made by an agent of the environment's own: verifiers, and games with all seats."""
        return _plays_itself(self.name, self.options)

    @model_validator(mode="before")
    @classmethod
    def _plays_as_an_agent(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not _plays_itself(data.get("name"), data.get("options")):
            return data
        agent = data.get("agent") or {}
        return {**data, "agent": {**_ALL, **agent} if isinstance(agent, Mapping) else agent}

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> Self:
        if self.is_mix:
            return self
        if self.reward is not None and self.rewards is not None:
            raise ValueError("env has reward and rewards: put the single one into the list")
        if self.agent is not None:
            self._check_agent()
        has_reward = self._has_reward or self.agent is not None or not self.NEEDS_REWARD
        given = {"dataset": self.dataset is not None, "reward": has_reward}
        if self.name == "chat" and not all(given.values()):
            raise ValueError(f"env {self.name} needs {' and '.join(key for key in given if not given[key])}")
        for column in ("prompt_column", "answer_column"):
            if self.name not in ("chat", *EMBEDDED) and getattr(self, column) is not None:
                raise ValueError(f"env.{column} is for data of your own: env {self.name} knows its columns")
        if self.options and not self._takes_options:
            raise ValueError(f"env.options is for an environment of your own: {self.name} takes none")
        for name, value in (("tools", self.tools), ("user", self.user)):
            if value and self.max_turns < 2:
                raise ValueError(f"env.{name} needs max_turns of at least 2, to continue after a reply: got 1")
        return self

    def _check_agent(self) -> None:
        """Raises ValueError for settings that an agent replaces."""
        if ":" in self.name:
            raise ValueError(f"env.agent gets rows, not an environment: name {self.name} is one; set env.dataset")
        own = self.plays_itself
        if own == self.agent.is_named:
            raise ValueError(
                f"env {self.name} plays its tasks itself: leave out env.agent.{'run' if self.agent.run else 'command'}"
                if own
                else "env.agent must have either run or command: got neither"
            )
        read = ("name", "agent", "retries", "max_conversation_tokens", "source")
        read += ("options",) if own else ("dataset", "config", "split")
        fields = type(self).model_fields
        given = [name for name in fields if name not in read and getattr(self, name) != fields[name].default]
        if given:
            who = f"env {self.name}" if own else "env.agent"
            raise ValueError(f"{who} does this itself: leave out {', '.join(f'env.{name}' for name in given)}")

    @model_validator(mode="after")
    def _names_can_be_loaded(self) -> Self:
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
        if self.name == VERIFIERS:
            from llmrl.endpoint.verifiers import VerifiersOptions

            checks["options",] = partial(VerifiersOptions.read, self.options)
        elif self._takes_options:  # imported here: these two import torch
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


def _plays_itself(name: object, options: object) -> bool:
    has_seats = isinstance(options, Mapping) and options.get("seats") is not None
    return name == VERIFIERS or (name in GAMES and has_seats)


SHARED_BY_SOURCES = ("retries", "on_rewrite", "max_prompt_tokens", "too_long", "max_conversation_tokens")


class SourceSettings(TaskSettings):
    """A task that is one source of a mix."""

    weight: float = Field(1.0, gt=0, description="prompts per step, in proportion to the weights of all sources")
    source: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="its name in metrics; null: that of the task, or of the dataset"
    )
    eval_dataset: str | None = Field(
        None, description="a file or hub name of problems to measure; null: the task's own held-out split"
    )

    @property
    def label(self) -> str:
        return self.source or super().label


def _sharing(env: Mapping[str, Any], sources: Iterable[Mapping[str, Any]], refusal: str) -> list[dict[str, Any]]:
    """The sources with what holds for the whole run. Raises ValueError with the ``refusal`` for one that differs."""
    shared = {name: env.get(name, TaskSettings.model_fields[name].default) for name in SHARED_BY_SOURCES}
    for source in sources:
        if differing := [name for name in SHARED_BY_SOURCES if source.get(name, shared[name]) != shared[name]]:
            raise ValueError(refusal.format(names := ", ".join(differing), names))
    return [{**source, **shared} for source in sources]


class EnvSettings(TaskSettings):
    """One task, or a mix of several."""

    mix: list[SourceSettings] | None = Field(
        None,
        description="several tasks, each with the keys of env, a weight, a name (source) and problems to measure "
        "(eval_dataset): the prompts of a step are drawn from them in proportion to the weights",
    )

    @property
    def is_mix(self) -> bool:
        return self.mix is not None

    @property
    def tasks(self) -> Sequence[TaskSettings]:
        return self.mix or (self,)

    @property
    def label(self) -> str:
        return super().label if self.mix is None else "+".join(source.label for source in self.mix)

    @model_validator(mode="before")
    @classmethod
    def _share_with_sources(cls, data: Any) -> Any:
        """Gives the sources what holds for the whole run, and itself the most turns of a source."""
        sources = data.get("mix") if isinstance(data, Mapping) else None
        if not isinstance(sources, list) or not all(isinstance(source, Mapping) for source in sources):
            return data
        filled = _sharing(data, sources, "env.mix: {} must be the same for all sources: set {} beside mix")
        turns = [source.get("max_turns", 1) for source in sources]
        most = max(turns) if turns and all(isinstance(n, int) for n in turns) else 1
        if data.get("max_turns", most) not in (most, 1):
            raise ValueError(
                f"env.max_turns beside mix is the most of its sources, {most}: got {data['max_turns']}; leave it out, "
                "or set it in each source"
            )
        return {**data, "max_turns": most, "mix": filled}

    @model_validator(mode="after")
    def _sources_fit_each_other(self) -> Self:
        if self.mix is None:
            return self
        fields, read = TaskSettings.model_fields, (*SHARED_BY_SOURCES, "max_turns")
        given = [name for name in fields if name not in read and getattr(self, name) != fields[name].default]
        if given:
            raise ValueError(f"env.mix: {', '.join(given)} beside mix would have no effect: set it in each source")
        if len(self.mix) < 2:
            raise ValueError(f"env.mix must have at least two sources: got {len(self.mix)}; a single one is env itself")
        if any(source.agent is not None for source in self.mix):
            raise ValueError("env.mix: a source cannot be an agent, verifiers or a game with seats: leave it out")
        labels = [source.label for source in self.mix]
        if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
            raise ValueError(f"env.mix: each source must have a name of its own: {twice[0]} is there twice; set source")
        return self


class SetSettings(SourceSettings):
    """A set of problems that is measured, with the keys of a source; ``source`` is its name."""

    split: str = Field("test", description="split of a folder, a hub dataset or an embedded task")


def with_sets(data: Any) -> Any:
    """The settings of a run, given as plain data, with each set of ``eval.sets`` complete: with its name, and if it
    does not name an environment, with what it does not say from ``env``.

    Raises  ValueError for what a set cannot have
    """
    section = data.get("eval") if isinstance(data, Mapping) else None
    sets = section.get("sets") if isinstance(section, Mapping) else None
    if not isinstance(sets, Mapping) or not all(isinstance(own, Mapping | None) for own in sets.values()):
        return data
    env = data.get("env")
    env = env.model_dump() if isinstance(env, Settings) else env
    if not isinstance(env, Mapping):
        raise ValueError("eval.sets are problems of an environment: set env; without it, eval.dataset is one file")
    filled = {str(name): _set(str(name), own or {}, env) for name, own in sets.items()}
    refusal = "eval.sets: {} must be the same for all sets and in training: set {} in env"
    complete = dict(zip(filled, _sharing(env, filled.values(), refusal), strict=True))
    return {**data, "eval": {**section, "sets": complete}}


def _set(name: str, own: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """The set ``name``, whose settings are ``own``, but for what all sets share."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"eval.sets: a name must consist of letters, digits, '_', '.' and '-': got {name!r}")
    cannot = {"weight": (None, 1.0), "eval_dataset": (None,), "agent": (None, env.get("agent")), "source": (None, name)}
    if given := [key for key, values in cannot.items() if own.get(key) not in values]:
        raise ValueError(f"eval.sets.{name}: a set of problems cannot have {', '.join(given)}: leave it out")
    if "name" in own or env.get("mix") is not None:
        return {**own, "source": name}
    dataset = env.get("dataset")
    if "dataset" not in own and (env.get("name", "chat") == "chat" or (dataset and Path(dataset).exists())):
        raise ValueError(f"eval.sets.{name} must name a dataset: that of env has no problems that are not trained on")
    not_inherited = ("split", *(["config"] if "dataset" in own else []))
    inherited = {key: env[key] for key in TaskSettings.model_fields if key in env and key not in not_inherited}
    return {**inherited, **own, "source": name}


class EvalSettings(Settings):
    """Evaluation on what is never trained on: greedy accuracy on problems, or the loss on rows."""

    sets: dict[str, SetSettings] | None = Field(
        None,
        min_length=1,
        description="several sets of problems by name, in place of dataset: {hard: {dataset: hard.jsonl}}; each has "
        "the keys of env, and those of env that it does not give unless it has a name",
    )
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
    batch_size: int = Field(512, ge=1, description="conversations, or rollouts of an agent, at the same time")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")

    @model_validator(mode="after")
    def _sets_are_all(self) -> Self:
        if self.sets and (self.dataset is not None or self.split != "test"):
            raise ValueError("eval.sets: each set has its own dataset and split: leave out eval.dataset and eval.split")
        return self
