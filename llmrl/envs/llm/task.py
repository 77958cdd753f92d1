"""`TaskEnv`: a dataset, the prompt made of each row, and the transform that scores the answers, as one environment.

A task is a subclass with a default dataset, a system prompt, `prompt_row` and `scorer`; `gsm8k`, `math`, `countdown`
and `ifeval` are four. How conversations run is `DatasetChatEnv`'s part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from llmrl.data.llm.dataset_files import REFERENCE_COLUMNS, load_rows, to_prompt
from llmrl.envs.llm.chat import DatasetChatEnv, checked_rows
from llmrl.envs.transforms.base import Transform
from llmrl.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TaskEnv"]

Row = Mapping[str, Any]


class TaskEnv(DatasetChatEnv):
    """A `DatasetChatEnv` that knows its dataset, its prompt and its reward.

    Reads   ``dataset``: a hub name, a local file of the same columns, or rows; None: the task's own
    Writes  what `DatasetChatEnv` and the task's `scorer` write
    Raises  DataError naming the row that the task cannot use

    ``compute_reward=False`` leaves the reward to a transform that is appended later. ``collate_fn(list of rows)``
    replaces `prompt_row`.
    """

    DATASET: ClassVar[str | None] = None
    CONFIG: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        dataset: str | Path | Sequence[Row] | None = None,
        name: str | None = None,
        compute_reward: bool = True,
        max_steps: int = 1,
        shuffle: bool = True,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Sequence[Row]] | None = None,
        input_mode: str = "history",
        data_key: str | None = None,
        primers: Any | None = None,
        system_prompt: str | None = None,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        batch_size_dl: int = 1,
        apply_template: bool = False,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
    ):
        scorer = self.scorer(tokenizer) if compute_reward else None  # first: what it needs may not be installed
        rows = self.rows(dataset, name=name, split=split) if isinstance(dataset, str | Path | None) else dataset
        super().__init__(
            dataset=rows,
            shuffle=shuffle,
            num_envs=num_envs,
            repeats=repeats,
            seed=seed,
            group_repeats=group_repeats,
            tokenizer=tokenizer,
            device=device,
            template_kwargs=template_kwargs,
            collate_fn=collate_fn or self.prompt_rows,
            input_mode=input_mode,
            data_key=data_key,
            primers=primers,
            system_prompt=system_prompt,
            max_steps=max_steps,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
            batch_size_dl=batch_size_dl,
            apply_template=apply_template,
            ray_backend=ray_backend,
            dataloader_actor_name=dataloader_actor_name,
        )
        if scorer is not None:
            self.append_transform(scorer)

    @classmethod
    def rows(
        cls, dataset: str | Path | None = None, *, name: str | None = None, split: str | None = None
    ) -> Sequence[Row]:
        """The rows of the task as its dataset has them; ``dataset`` is a file or hub name instead of the task's own."""
        if name is None and dataset in (None, cls.DATASET):
            name = cls.CONFIG
        return load_rows(dataset or cls.DATASET, split=split or "train", name=name)

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        """What a conversation starts from: "query", and the columns that the scorer reads; ``number`` is for errors."""
        return to_prompt(row, number=number)

    @classmethod
    def row_with_reference(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        """`to_prompt` of a row that must have a reference: "query" and "answer". Raises DataError naming the row."""
        prompt = to_prompt(row, number=number)
        if "answer" not in prompt:
            where = "a row" if number is None else f"row {number} of the dataset"
            raise DataError(
                f"{cls.__name__}: {where} must have a reference column, one of {', '.join(REFERENCE_COLUMNS)}: its "
                f"columns are {', '.join(row)}.{did_you_mean('answer', row)}"
            )
        return prompt

    @classmethod
    @abstractmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None) -> Transform:
        """The transform that writes the reward."""

    @classmethod
    def prompt_rows(cls, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """`prompt_row` of every row, counted from 1."""
        return [cls.prompt_row(row, number) for number, row in enumerate(checked_rows(rows, cls.__name__), 1)]
