"""Environments by the settings of a recipe: prompts to train on, problems to measure on, tools, a user, and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from llmrl.data.llm.dataset_files import load_rows
from llmrl.envs.llm.big_sums import big_sums_problems
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.countdown import CountdownEnv
from llmrl.envs.llm.gsm8k import GSM8KEnv
from llmrl.envs.llm.ifeval import IFEvalEnv
from llmrl.envs.llm.math import MATHEnv
from llmrl.envs.llm.sums import sums_problems, sums_reward
from llmrl.envs.llm.task import TaskEnv
from llmrl.envs.llm.transforms import ToolTransform
from llmrl.envs.llm.transforms.reward import RewardFunction
from llmrl.envs.llm.transforms.reward_list import make_rewards
from llmrl.envs.llm.transforms.reward_source import load_reward
from llmrl.envs.llm.transforms.user_turn import UserTurn
from llmrl.envs.transforms.base import Transform
from llmrl.errors import DataError
from llmrl.modules.llm.rendering import Renderer
from llmrl.recipes.settings import EnvSettings, EvalSettings
from llmrl.tools import load_tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Task", "eval_rows", "training_rows"]

Row = Mapping[str, Any]

_PUBLIC: dict[str, type[TaskEnv]] = {
    "gsm8k": GSM8KEnv,
    "math": MATHEnv,
    "countdown": CountdownEnv,
    "ifeval": IFEvalEnv,
}
_EMBEDDED = {"sums": sums_problems, "big_sums": big_sums_problems}
_AT_ONCE = 1024  # prompts that are measured together


def training_rows(env: EnvSettings) -> Sequence[Row]:
    """The rows that rollouts start from. Raises DataError for data that are missing or empty."""
    return _rows(env, env.dataset, env.split)


def eval_rows(env: EnvSettings, settings: EvalSettings) -> Sequence[Row] | None:
    """The rows that are only measured; None where the settings name none: a local file has no other split."""
    if env.name == "chat" and settings.dataset is None:
        return None
    rows = _rows(env, settings.dataset or env.dataset, settings.split)
    return [rows[index] for index in range(min(len(rows), settings.rows or len(rows)))]


class Task:
    """What the settings say about a conversation, loaded once, and the environments that are made of it.

    Raises  ConfigError for a tool, a user or a reward that cannot be loaded; MissingDependencyError for a package that
            one of them needs. Tools are loaded when prompts are measured, rewards for the first environment
    """

    def __init__(self, settings: EnvSettings, tokenizer: PreTrainedTokenizerBase):
        self.settings = settings
        self.tokenizer = tokenizer

    def fit_prompts(self, rows: Sequence[Row]) -> tuple[list[Row], int]:
        """The rows whose prompts, with system prompt and tools, fit ``max_prompt_tokens``, and how many were left out.

        Raises  DataError that names the first that does not, if ``too_long`` is "error"
        """
        limit, lengths = self.settings.max_prompt_tokens, self._prompt_lengths(rows)
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if len(kept) < len(rows) and self.settings.too_long == "error":
            number = next(number for number, length in enumerate(lengths) if length > limit)
            raise DataError(
                f"prompts: must be at most env.max_prompt_tokens = {limit} tokens long: row {number + 1} has "
                f"{lengths[number]}, {len(rows) - len(kept)} of {len(rows)} rows are too long; raise it, or leave them "
                "out with env.too_long=drop."
            )
        if not kept:
            raise DataError(f"prompts: all {len(rows)} are longer than env.max_prompt_tokens = {limit}.")
        return kept, len(rows) - len(kept)

    def make_env(self, rows: Sequence[Row], **options: Any) -> DatasetChatEnv:
        """The environment over ``rows``: prompts, tools, user and rewards; ``options`` are those of `DatasetChatEnv`.

        Environments of one task share its tools and reward functions, each with conversations of its own.
        """
        env = self._asking(rows, **options)
        for transform in (*self._acting, *self._scoring):
            env.append_transform(transform.clone())
        return env

    def close(self) -> None:
        """Ends what tools and rewards hold, if they were loaded."""
        for name in ("_acting", "_scoring"):
            for transform in self.__dict__.get(name, ()):
                transform.close()

    @property
    def tools(self) -> ToolTransform | None:
        """The transform that environments have copies of."""
        return next((transform for transform in self._acting if isinstance(transform, ToolTransform)), None)

    def _asking(self, rows: Sequence[Row], **options: Any) -> DatasetChatEnv:
        settings = self.settings
        options = {"system_prompt": settings.system_prompt, "max_steps": settings.max_turns, **options}
        if settings.name in _PUBLIC:
            return _PUBLIC[settings.name](dataset=rows, compute_reward=False, **options)
        return DatasetChatEnv(
            dataset=rows, prompt_column=settings.prompt_column, answer_column=settings.answer_column, **options
        )

    @cached_property
    def _acting(self) -> list[Transform]:
        """Tools, then the user: who answers the policy."""
        settings = self.settings
        acting: list[Transform] = []
        if settings.tools:
            named = [{tool: None} if isinstance(tool, str) else tool for tool in settings.tools]
            acting.append(
                ToolTransform(
                    [load_tool(name, options) for tool in named for name, options in tool.items()],
                    format=settings.tool_format,
                    timeout_s=settings.tool_timeout_s,
                    end_without_call=settings.user is None,
                    declare=settings.declare_tools,
                    tokenizer=self.tokenizer,
                )
            )
        if settings.user:
            acting.append(UserTurn(load_reward(settings.user, what="user"), retries=settings.retries))
        return acting

    @cached_property
    def _scoring(self) -> list[Transform]:
        settings = self.settings
        shared = {"deadline_s": settings.reward_deadline_s, "retries": settings.retries}
        if settings.reward is not None:
            return [RewardFunction(load_reward(settings.reward), **shared)]
        if settings.rewards is not None:
            specs = [reward.model_dump(exclude_none=True) for reward in settings.rewards]
            specs = [{**(shared if "fn" in spec else {"retries": settings.retries}), **spec} for spec in specs]
            return list(make_rewards(specs, tokenizer=self.tokenizer))
        if settings.name in _PUBLIC:
            return [_PUBLIC[settings.name].scorer(self.tokenizer)]
        return [RewardFunction(sums_reward, name="correct", **shared)]

    def _prompt_lengths(self, rows: Sequence[Row]) -> list[int]:
        """In tokens, of what an environment without rewards asks: nothing can be forgotten."""
        env = self._asking(rows, shuffle=False, num_envs=min(_AT_ONCE, len(rows)))
        for transform in self._acting:
            env.append_transform(transform.clone())
        renderer, lengths = Renderer(self.tokenizer), []
        while len(lengths) < len(rows):
            count = min(_AT_ONCE, len(rows) - len(lengths))
            chats = env.reset(TensorDict({}, batch_size=[count]))["history"].prompt.to_chats()
            lengths += [len(ids) for ids in renderer.prompt_ids(chats)]
        return lengths


def _rows(env: EnvSettings, dataset: str | None, split: str) -> Sequence[Row]:
    if env.name in _PUBLIC:
        return _PUBLIC[env.name].rows(dataset, name=env.config, split=split)
    if dataset is None:
        return _EMBEDDED[env.name](split)
    return load_rows(dataset, split=split, name=env.config)
