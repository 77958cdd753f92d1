"""Environments by the settings of a recipe: the prompts to train on, the problems to measure on, and the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmrl.data.llm.dataset_files import load_rows, to_prompt
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.gsm8k import GSM8KEnv
from llmrl.envs.llm.sums import sums_problems, sums_reward
from llmrl.envs.llm.transforms.reward import RewardFunction, load_reward
from llmrl.errors import DataError
from llmrl.recipes.settings import EnvSettings, EvalSettings

if TYPE_CHECKING:
    from llmrl.modules.llm.rendering import Renderer

__all__ = ["eval_rows", "fit_prompts", "make_env", "training_rows"]

Row = Mapping[str, Any]
_GSM8K = "openai/gsm8k"


def training_rows(env: EnvSettings) -> Sequence[Row]:
    """The rows that rollouts start from. Raises DataError for data that are missing or empty."""
    return _rows(env, env.dataset, env.split)


def eval_rows(env: EnvSettings, settings: EvalSettings) -> Sequence[Row] | None:
    """The rows that are only measured; None where the settings name none: a local file has no other split."""
    if env.name == "chat" and settings.dataset is None:
        return None
    return list(_rows(env, settings.dataset or env.dataset, settings.split))[: settings.rows]


def fit_prompts(env: EnvSettings, rows: Sequence[Row], renderer: Renderer) -> tuple[list[Row], int]:
    """The rows whose prompts fit ``env.max_prompt_tokens``, and how many were left out.

    Raises  DataError that names the first that does not, if ``env.too_long`` is "error"
    """
    system = env.system_prompt or (GSM8KEnv.SYSTEM_PROMPT if env.name == "gsm8k" else None)
    before = [{"role": "system", "content": system}] if system else []
    chats = []
    for number, row in enumerate(rows, 1):
        query = to_prompt(row, number=number, prompt_column=env.prompt_column, answer_column=env.answer_column)["query"]
        chats.append([*before, *([{"role": "user", "content": query}] if isinstance(query, str) else query)])
    lengths = [len(ids) for ids in renderer.prompt_ids(chats)]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= env.max_prompt_tokens]
    if len(kept) < len(rows) and env.too_long == "error":
        number = next(i for i, length in enumerate(lengths) if length > env.max_prompt_tokens)
        raise DataError(
            f"prompts: must be at most env.max_prompt_tokens = {env.max_prompt_tokens} tokens long: row {number + 1} "
            f"has {lengths[number]}, {len(rows) - len(kept)} of {len(rows)} rows are too long; raise it, or leave them "
            "out with env.too_long=drop."
        )
    if not kept:
        raise DataError(f"prompts: all {len(rows)} are longer than env.max_prompt_tokens = {env.max_prompt_tokens}.")
    return kept, len(rows) - len(kept)


def make_env(env: EnvSettings, rows: Sequence[Row], **options: Any) -> DatasetChatEnv:
    """The environment of the task over ``rows``, reward included; ``options`` are those of `DatasetChatEnv`."""
    options = {"system_prompt": env.system_prompt, "max_steps": env.max_turns, **options}
    if env.name == "gsm8k":
        made: DatasetChatEnv = GSM8KEnv(dataset=rows, compute_reward=env.reward is None, **options)
    else:
        made = DatasetChatEnv(dataset=rows, prompt_column=env.prompt_column, answer_column=env.answer_column, **options)
    if env.name == "sums" and env.reward is None:
        made.append_transform(RewardFunction(sums_reward, name="correct", deadline_s=env.reward_deadline_s))
    elif env.reward is not None:
        made.append_transform(RewardFunction(load_reward(env.reward), deadline_s=env.reward_deadline_s))
    return made


def _rows(env: EnvSettings, dataset: str | None, split: str) -> Sequence[Row]:
    if dataset is None and env.name == "sums":
        return sums_problems(split)
    if dataset is None:
        return load_rows(_GSM8K, split=split, name=env.config or "main")
    return load_rows(dataset, split=split, name=env.config)
