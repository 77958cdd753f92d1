"""`EpisodeEnv`: the base of environments whose conversations are episodes of something with ``reset`` and ``step``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.data.llm.rows import to_prompt
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.options import split_keywords
from llmrl.envs.llm.tasks.task import Row, TaskEnv
from llmrl.envs.llm.transforms.episodes import EPISODE, EpisodeReward, EpisodeTurns, as_json
from llmrl.envs.llm.transforms.tools import ToolTransform
from llmrl.errors import ConfigError, check_at_least
from llmrl.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ITEMS = 256
_SEEDS = {"train": 0, "validation": 2**30, "test": 2**30}  # added to items_seed: held-out episodes have other seeds


class EpisodeEnv(TaskEnv):
    """A `TaskEnv` whose rows start episodes. A subclass defines `turns`, and `rows` if it knows more than seeds.

    Reads   ``dataset``: rows whose columns an episode is started with, and whose prompt precedes the first observation
    Writes  the entries of `EpisodeTurns`

    ``options`` are those of `DatasetChatEnv`, `rows` and `turns`.
    """

    def __init__(
        self,
        *,
        dataset: str | Path | Sequence[Row] | None = None,
        name: str | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ):
        receivers = (DatasetChatEnv, self.rows, self.turns)
        asked, of_rows, of_turns = split_keywords(options, type(self).__name__, *receivers)
        if isinstance(dataset, str | Path | None):
            dataset = self.rows(dataset, name=name, split=split, **of_rows)
        super().__init__(dataset=dataset, compute_reward=False, tokenizer=tokenizer, **asked)
        if compute_reward:  # in a recipe the turns come later, with the user's tools
            tools, turns = self.turns(**of_turns)
            if tools:
                limits = {"timeout_s": turns.step_timeout_s, "max_result_chars": turns.max_chars}
                self.append_transform(ToolTransform(tools, tokenizer=tokenizer, **limits))
            self.append_transform(turns)
            self.append_transform(self.scorer(tokenizer))

    @classmethod
    def rows(
        cls,
        dataset: str | Path | None = None,
        *,
        name: str | None = None,
        split: str | None = None,
        items: int | None = None,
        eval_items: int = 0,
        items_seed: int = 0,
        prompt: str | None = None,
    ) -> Sequence[Row]:
        """A row for each of ``items`` seeds from ``items_seed`` on, or ``eval_items`` others in another split: "query",
        the ``prompt`` before the first observation, and "episode"; or the rows of ``dataset``.
        """
        if dataset is not None:
            return super().rows(dataset, name=name, split=split)
        check_at_least(cls.__name__, 1, items=items)
        check_at_least(cls.__name__, 0, eval_items=eval_items, items_seed=items_seed)
        trained = split in (None, "train")
        first = items_seed + _SEEDS.get(split or "train", 2**30)
        count = (items or ITEMS) if trained else eval_items
        return [{"query": prompt or "", EPISODE: as_json({"seed": seed})} for seed in range(first, first + count)]

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        if EPISODE in row:
            return {"query": row["query"], EPISODE: row[EPISODE]}
        return {"query": to_prompt(row, number=number)["query"], EPISODE: as_json({"seed": number, **row})}

    @classmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None) -> EpisodeReward:
        return EpisodeReward()

    @classmethod
    def turns(cls) -> tuple[Sequence[Tool], EpisodeTurns]:
        """The tools that act in an episode, if the policy's text does not, and the transform that keeps episodes."""
        raise ConfigError(f"{cls.__name__}: must define turns.")
