"""Environments from the ``env`` section: training prompts, evaluation problems, tools, a user, and rewards.

The rows of a mix are those of its sources, one after the other, each with the name of its source in a column.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDict

from llmrl.data.llm.images import refuse_images
from llmrl.data.llm.row_reading import place_of
from llmrl.data.llm.rows import read_prompt
from llmrl.data.ragged.tensordicts import column_values
from llmrl.endpoint.verifiers import verifiers_about
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.options import keywords_of
from llmrl.envs.llm.rewards.judge import JudgeReward
from llmrl.envs.llm.tasks.embedded import EMBEDDED_TASKS
from llmrl.envs.llm.tasks.reasoning_gym import ReasoningGymEnv
from llmrl.envs.llm.transforms import ToolTransform
from llmrl.envs.llm.transforms.reward import RewardFunction, make_rewards
from llmrl.envs.llm.transforms.user_turn import UserTurn
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, DataError, LLMRLError
from llmrl.loading import load_function
from llmrl.modules.llm.policies.columns import refuse_reserved
from llmrl.modules.llm.rendering import Renderer, text_tokenizer
from llmrl.optional import check_installed
from llmrl.run.model_names import resolve_model
from llmrl.tools import load_tool
from llmrl.train.environments import env_maker, env_rows, has_episodes, is_file, is_task
from llmrl.train.mixed_env import SOURCE, MixedEnv
from llmrl.train.settings.environment import EnvSettings, EvalSettings, SetSettings, SourceSettings, TaskSettings
from llmrl.train.settings.types import VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

_AT_ONCE = 1024  # prompts that are tokenised together


def training_rows(env: EnvSettings) -> Sequence[Row]:
    """The rows whose prompts rollouts start from. Raises DataError for data that are missing or empty."""
    if env.is_mix:
        return [_tagged(row, source.label) for source in env.mix for row in training_rows(source)]
    return env_rows(env.name, env.dataset, split=env.split, config=env.config, options=env.options)


def eval_rows(env: EnvSettings, settings: EvalSettings) -> Sequence[Row] | None:
    """The evaluation rows; None if the settings name none: a local file has no other split.

    Raises  ConfigError for a mix whose rows ``eval.dataset`` names, which says nothing of their sources
    """
    if settings.sets:
        found = []
        for own in settings.sets.values():
            asked = settings.model_copy(update={"sets": None, "dataset": own.dataset, "split": own.split})
            if (rows := eval_rows(own, asked)) is None:
                raise ConfigError(f"eval.sets.{own.label}: must have problems to measure: set its dataset.")
            found += [_tagged(row, own.label) for row in rows]
        return found
    if env.is_mix:
        if settings.dataset is not None:
            raise ConfigError("eval.dataset: a mix is measured by source: set eval_dataset in those of env.mix.")
        found = []
        for source in env.mix:
            rows = eval_rows(source, settings.model_copy(update={"dataset": source.eval_dataset}))
            found += [_tagged(row, source.label) for row in rows or ()]
        return found or None
    if settings.dataset is None and (env.name == "chat" or is_file(env.dataset)):
        return None
    dataset = settings.dataset or env.dataset
    rows = env_rows(env.name, dataset, split=settings.split, config=env.config, options=env.options)
    return [rows[index] for index in range(min(len(rows), settings.rows or len(rows)))] or None


def _tagged(row: Row, source: str) -> Row:
    """A copy of the row that names its source."""
    if SOURCE in row:
        raise DataError(
            f"env.mix, eval.sets: a column must not have the name {SOURCE!r}, which names the source: rename it."
        )
    tagged = copy.copy(row)
    tagged[SOURCE] = source
    return tagged


def _check_agent_rows(rows: Sequence[Row], who: str) -> None:
    """Raises MissingDependencyError without the server that agents call, DataError for columns with reserved names."""
    for package in ("starlette", "uvicorn"):
        check_installed(package, extra="serve", used_by="env.agent")
    if rows:
        refuse_reserved(rows[0], who)


def _nothing(completion: str) -> float:
    """The reward of a run that needs none."""
    return 0.0


class Task:
    """Tools, user and rewards of the settings, loaded once, and the environments that use them.

    Raises  ConfigError for an environment, a tool, a user or a reward that cannot be used; MissingDependencyError for a
            package that one of them needs; DataError for the files of a reward model: all when prompt lengths are
            computed. The weights of a reward model are loaded by the first `make_env`
    """

    def __init__(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase):
        self.settings = settings
        self.processor, self.tokenizer = tokenizer, text_tokenizer(tokenizer)
        self.unused_keys: list[str] = []  # of the messages of prompts, see `Renderer.unused_keys`
        self._sets: Task | None = None

    def parts(self, rows: Sequence[Row]) -> list[tuple[Task, list[Row]]]:
        """The tasks that the rows are of, each with its own; of a mix, those that have any."""
        return [(self, list(rows))]

    def measured(self, settings: EvalSettings) -> Task:
        """The task of `eval_rows`: this one, or that of ``eval.sets``, which is made once and closed with this one."""
        if settings.sets and self._sets is None:
            self._sets = MixedTask(self.settings, self.processor, settings.sets.values())
        return self._sets if settings.sets else self

    def fit_prompts(self, rows: Sequence[Row]) -> tuple[list[Row], int, list[int]]:
        """The rows whose prompts, with system prompt and tools, fit ``max_prompt_tokens``; the number of the others;
        the lengths of those that fit, in tokens: none of an agent's, nor of episodes, which are known when they begin.

        Raises  DataError that names the first row that does not fit, if ``too_long`` is "error"
        """
        if self.settings.agent is not None:  # which makes its prompts itself
            _check_agent_rows(rows, "env.dataset")
            return list(rows), 0, []
        if self._has_episodes:
            return list(rows), 0, []
        limit, lengths = self.settings.max_prompt_tokens, self._prompt_lengths(rows)
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if len(kept) < len(rows) and self.settings.too_long == "error":
            number = next(number for number, length in enumerate(lengths) if length > limit)
            place = place_of(rows[number], number + 1)
            raise DataError(
                f"prompts: must be at most env.max_prompt_tokens = {limit} tokens long: {place} has "
                f"{lengths[number]}, {len(rows) - len(kept)} of {len(rows)} rows are too long; raise it, or leave them "
                "out with env.too_long=drop."
            )
        if not kept:
            raise DataError(f"prompts: all {len(rows)} are longer than env.max_prompt_tokens = {limit}.")
        return kept, len(rows) - len(kept), [length for length in lengths if length <= limit]

    def longest_prompt(self, rows: Sequence[Row]) -> int:
        """The length of the longest prompt of these rows, in tokens; 0 where `fit_prompts` gives no lengths. Raises
        DataError for images that a reward cannot read, and TemplateError for images that the model cannot read.
        """
        if self.settings.agent is not None:
            _check_agent_rows(rows, "eval.dataset")
            return 0
        if self._has_episodes:
            return 0
        return max(self._prompt_lengths(rows), default=0) if rows else 0

    def scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows whose answers get a reward: all, or none of a task without one, which there is nothing to measure
        by. An agent gives its own.
        """
        settings = self.settings
        if settings.NEEDS_REWARD or settings.agent is not None or not rows:
            return list(rows)
        env = self._asking(rows[:1], (*self._acting, *self._planned), shuffle=False, num_envs=1)
        return list(rows) if env.reward_keys else []

    def unused_columns(self, rows: Sequence[Row]) -> list[str]:
        """Columns of the first row that neither its prompt nor a reward reads."""
        settings = self.settings
        # An agent, a user, a task and an environment of the user's may read any column.
        if settings.agent or settings.user or env_maker(settings.name) is not DatasetChatEnv:
            return []
        columns = {"prompt_column": settings.prompt_column, "answer_column": settings.answer_column}
        rewards = [reward for reward in self._planned if isinstance(reward, RewardFunction)]
        unread = read_prompt(rows[0], **columns)[1]
        replaced = "answer" if settings.answer_column else None  # by that column, if it is not read itself
        unread = [name for name in unread if name == replaced or not any(reward.reads(name) for reward in rewards)]
        return [name for name in unread if name != SOURCE]

    def make_env(self, rows: Sequence[Row], **options: Any) -> DatasetChatEnv:
        """An environment on ``rows``, with tools, user and rewards; ``options`` are those of `DatasetChatEnv`.

        Environments of one task share its tools and reward functions, but not conversations.
        """
        if self.settings.agent is not None:
            raise ConfigError("env.agent: conversations are the agent's own: there is no environment.")
        env = self._asking(rows, (*self._acting, *self._scoring), **options)
        if not env.reward_keys and not self.settings.NEEDS_REWARD:
            env.append_transform(RewardFunction(_nothing, name="none"))
        if not env.reward_keys:
            raise ConfigError(
                f"environment: {self.settings.label} gives no reward: append a transform with a reward, which declares "
                "it in transform_reward_spec, or set env.reward."
            )
        return env

    def close(self) -> None:
        """Closes tools and rewards, if they were loaded."""
        made = [each for name in ("_acting", "_planned", "_scoring") for each in self.__dict__.get(name, ())]
        with ExitStack() as stack:  # closes all, even if one fails
            for part in {id(each): each for each in [*made, self._sets] if each is not None}.values():
                stack.callback(part.close)

    @property
    def tools(self) -> ToolTransform | None:
        """The tool transform, of which each environment has a copy; None without tools."""
        return next((transform for transform in self._acting if isinstance(transform, ToolTransform)), None)

    def about(self, settings: EvalSettings, at_once: int) -> str:
        """What a task says of itself in the plan of a run with ``at_once`` conversations at a time; "" for most."""
        env, maker = self.settings, env_maker(self.settings.name)
        if env.name == VERIFIERS:
            return verifiers_about(env.options)
        if (env.agent is not None and env.agent.is_named) or not is_task(maker):
            return ""
        options = env.options if env.dataset is None or self._has_episodes else {}
        return maker.about(None if settings.dataset else settings.split, at_once=at_once, **options)

    @property
    def reward_weights(self) -> dict[NestedKey, float]:
        """The column of each reward function that counts, and its weight."""
        rewards = [reward for reward in self._planned if isinstance(reward, RewardFunction)]
        return {("next", f"reward_{reward.name}"): reward.weight for reward in rewards if reward.weight}

    @property
    def _has_episodes(self) -> bool:
        return self.settings.agent is None and has_episodes(env_maker(self.settings.name))

    def _asking(self, rows: Sequence[Row], transforms: Iterable[Transform], **options: Any) -> DatasetChatEnv:
        settings, maker = self.settings, env_maker(self.settings.name)
        options = {"system_prompt": settings.system_prompt, "max_steps": settings.max_turns, **options}
        if maker is DatasetChatEnv:
            options |= {"prompt_column": settings.prompt_column, "answer_column": settings.answer_column}
        elif is_task(maker):
            options["compute_reward"] = False  # appended later, after the tools
        env = maker(dataset=rows, **options, **settings.options)
        if not isinstance(env, DatasetChatEnv):
            raise ConfigError(f"environment: {settings.label} must return a DatasetChatEnv: got {type(env).__name__}.")
        for transform in transforms:
            env.append_transform(transform.clone())  # a transform belongs to one env
        return env

    @cached_property
    def _acting(self) -> list[Transform]:
        """The transforms that answer the policy: tools, then the user."""
        settings, maker = self.settings, env_maker(self.settings.name)
        acting: list[Transform] = []
        named = [{tool: None} if isinstance(tool, str) else tool for tool in settings.tools]
        tools, turns, limits = [load_tool(name, options) for tool in named for name, options in tool.items()], None, {}
        if self._has_episodes:
            acting_tools, turns = maker.turns(**keywords_of(maker.turns, settings.options))
            if acting_tools and settings.max_turns < 2:
                raise ConfigError(f"env.max_turns: {settings.label} acts by tools and needs at least 2: got 1.")
            tools += acting_tools
            limits = {"max_result_chars": turns.max_chars}
        if tools:
            acting.append(
                ToolTransform(
                    tools,
                    format=settings.tool_format,
                    timeout_s=settings.tool_timeout_s,
                    end_without_call=settings.user is None and (turns is None or not turns.by_text),
                    declare=settings.declare_tools,
                    tokenizer=self.tokenizer,
                    **limits,
                )
            )
        if turns is not None:
            acting.append(turns)
        if settings.user:
            acting.append(UserTurn(load_function(settings.user, what="user"), retries=settings.retries))
        return acting

    @cached_property
    def _planned(self) -> list[Transform]:
        """Like `_scoring`, but only checks the files of reward models, without loading their weights."""
        return self._make_rewards(load=False) if self._has_reward_model else self._scoring

    @property
    def _has_reward_model(self) -> bool:
        return any(reward.reward_model for reward in self.settings.rewards or ())

    @cached_property
    def _scoring(self) -> list[Transform]:
        return self._make_rewards()

    def _make_rewards(self, *, load: bool = True) -> list[Transform]:
        settings = self.settings
        shared = {"deadline_s": settings.reward_deadline_s, "retries": settings.retries}
        if settings.reward is not None:
            return [RewardFunction(settings.reward, **shared)]
        if settings.rewards is not None:
            specs = [reward.model_dump(exclude_none=True) for reward in settings.rewards]
            for judge in (spec["reward_model"] for spec in specs if "model" in spec.get("reward_model", {})):
                judge["model"] = str(resolve_model(judge["model"], runs=Path("runs"), setting="reward_model.model"))
            specs = [{**(shared if "fn" in spec else {"retries": settings.retries}), **spec} for spec in specs]
            return list(make_rewards(specs, tokenizer=self.tokenizer, load=load))
        maker = env_maker(settings.name)
        if maker is ReasoningGymEnv:
            return [maker.scorer(self.tokenizer, **shared)]
        if is_task(maker):
            return [maker.scorer(self.tokenizer)]
        if maker is not DatasetChatEnv:
            return []  # a user-defined environment has its own reward
        if self.settings.name == "chat":
            return []  # checked before: a run that needs no reward
        return [RewardFunction(EMBEDDED_TASKS[settings.name].reward, name="correct", **shared)]

    def prompts_with(self, column: str, rows: Sequence[Row], who: str) -> list[tuple[Any, str]]:
        """The messages of each prompt, with system prompt and tools, and the row's text in ``column``.

        Raises  DataError that names the first row without it; ``who``: the setting that names the column
        """
        found = []
        for td in self._resets(rows):
            chats = td["history"].prompt.to_chats()
            for chat, value in zip(chats, column_values(td, column) or [None] * len(chats), strict=True):
                if not (isinstance(value, str) and value.strip()):
                    place = place_of(rows[len(found)], len(found) + 1)
                    columns = ", ".join(name for name in rows[len(found)] if name != SOURCE)
                    raise DataError(
                        f"{who}: every row must have text in the column {column!r}: got {value!r} in {place}, which "
                        f"has {columns}; add it, or leave such rows out."
                    )
                found.append((chat, value))
        return found

    def _resets(self, rows: Sequence[Row]) -> Iterator[TensorDict]:
        """Conversations that begin with these rows in turn, at most `_AT_ONCE` together."""
        options = {"shuffle": False, "num_envs": min(_AT_ONCE, len(rows))}
        transforms = (*self._acting, *self._planned)
        # `make_env` would load a reward model's weights, which must happen after the plan.
        judged = self._has_reward_model
        env = self._asking(rows, transforms, **options) if judged else self.make_env(rows, **options)
        for start in range(0, len(rows), _AT_ONCE):
            yield env.reset(TensorDict({}, batch_size=[min(_AT_ONCE, len(rows) - start)]))

    def _prompt_lengths(self, rows: Sequence[Row]) -> list[int]:
        """Lengths of the prompts in tokens, with system prompt and tools."""
        judged = self._has_reward_model
        rewards = [getattr(transform, "fn", None) for transform in self._planned]
        judges = [(each, column) for each in rewards if isinstance(each, JudgeReward) for column in each.columns]
        renderer, lengths = Renderer(self.processor), []
        for td in self._resets(rows):
            chats = td["history"].prompt.to_chats()
            for chat in chats if judged else ():
                refuse_images(chat, "rewards: reward_model")
            for judge, column in judges:
                for row, value in enumerate(column_values(td, column) or (), len(lengths) + 1):
                    judge.shown(column, value, row=row)
            lengths += [len(ids) for ids in renderer.prompt_ids(chats)]
        self.unused_keys = [*dict.fromkeys([*self.unused_keys, *renderer.unused_keys])]
        return lengths


class MixedTask(Task):
    """The tasks of a mix or of sets that are measured, ``tasks`` by the names of their ``sources``, as one."""

    def __init__(
        self, settings: EnvSettings, tokenizer: PreTrainedTokenizerBase, sources: Iterable[SourceSettings] | None = None
    ):
        super().__init__(settings, tokenizer)
        self.tasks = {source.label: Task(source, tokenizer) for source in sources or settings.mix}

    def parts(self, rows: Sequence[Row]) -> list[tuple[Task, list[Row]]]:
        of = {name: [row for row in rows if row[SOURCE] == name] for name in self.tasks}
        return [(task, of[name]) for name, task in self.tasks.items() if of[name]]

    def fit_prompts(self, rows: Sequence[Row]) -> tuple[list[Row], int, list[int]]:
        kept, dropped, lengths = [], 0, []
        for task, own in self.parts(rows):
            with _named(task):
                found = task.fit_prompts(own)
            kept, dropped, lengths = kept + found[0], dropped + found[1], lengths + found[2]
        self.unused_keys = [*dict.fromkeys(key for task in self.tasks.values() for key in task.unused_keys)]
        return kept, dropped, lengths

    def longest_prompt(self, rows: Sequence[Row]) -> int:
        longest = 0
        for task, own in self.parts(rows):
            with _named(task):
                longest = max(longest, task.longest_prompt(own))
        return longest

    def scored(self, rows: Sequence[Row]) -> list[Row]:
        return [row for task, own in self.parts(rows) for row in task.scored(own)]

    def prompts_with(self, column: str, rows: Sequence[Row], who: str) -> list[tuple[Any, str]]:
        found = []
        for task, own in self.parts(rows):
            with _named(task):
                found += task.prompts_with(column, own, who)
        return found

    def unused_columns(self, rows: Sequence[Row]) -> list[str]:
        return [
            f"{name} of {task.settings.label}" for task, own in self.parts(rows) for name in task.unused_columns(own)
        ]

    def make_env(self, rows: Sequence[Row], **options: Any) -> TransformedEnv:
        envs = {task.settings.label: task.make_env(own, **options) for task, own in self.parts(rows)}
        weights = {source.label: source.weight for source in self.settings.mix}
        dealing = {name: options[name] for name in ("repeats", "seed", "rank", "world_size") if name in options}
        return TransformedEnv(MixedEnv(envs, weights, **dealing))

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(super().close)
            for task in self.tasks.values():
                stack.callback(task.close)


def make_task(settings: EnvSettings, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task of the settings, or the tasks of its mix as one."""
    return (MixedTask if settings.is_mix else Task)(settings, tokenizer)


@contextmanager
def _named(task: Task) -> Iterator[None]:
    """Adds the name of the source to what is raised."""
    try:
        yield
    except LLMRLError as error:
        where = "eval.sets: set" if isinstance(task.settings, SetSettings) else "env.mix: source"
        raise type(error)(f"{where} {task.settings.label}: {error}") from error
