"""`TaskEnv`: an environment made of a dataset, the prompt of each row, and the transform that scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.row_reading import REFERENCE_COLUMNS, place_of
from llmrl.data.llm.rows import to_prompt
from llmrl.envs.llm.chat import DatasetChatEnv, checked_rows
from llmrl.envs.llm.options import split_keywords
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]


class TaskEnv(DatasetChatEnv):
    """A `DatasetChatEnv` with its own dataset, prompt and reward. A subclass defines ``SCORER`` or `scorer`.

    Reads   ``dataset``: a hub name, a local file of the same columns, or rows; None: the task's own
    Writes  the entries of `DatasetChatEnv` and of the task's `scorer`
    Raises  DataError naming the row that the task cannot use

    ``compute_reward=False`` leaves the reward to a transform that is appended later. ``collate_fn(list of rows)``
    replaces `prompt_row`. ``options`` are the other arguments of `DatasetChatEnv`.
    """

    DATASET: ClassVar[str | None] = None
    CONFIG: ClassVar[str | None] = None
    SCORER: ClassVar[type[Transform]]

    def __init__(
        self,
        *,
        dataset: str | Path | Sequence[Row] | None = None,
        name: str | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        collate_fn: Callable[[list[Any]], Sequence[Row]] | None = None,
        **options: Any,
    ):
        split_keywords(options, type(self).__name__, DatasetChatEnv)
        if columns := sorted({"prompt_column", "answer_column"} & options.keys()):
            raise ConfigError(f"{type(self).__name__}: prompt_row chooses the columns: {columns[0]} cannot be set.")
        scorer = self.scorer(tokenizer) if compute_reward else None  # first, to fail early if its package is missing
        rows = self.rows(dataset, name=name, split=split) if isinstance(dataset, str | Path | None) else dataset
        super().__init__(dataset=rows, tokenizer=tokenizer, collate_fn=collate_fn or self.prompt_rows, **options)
        if scorer is not None:
            self.append_transform(scorer)

    @classmethod
    def rows(
        cls, dataset: str | Path | None = None, *, name: str | None = None, split: str | None = None
    ) -> Sequence[Row]:
        """The unmodified rows of the task's dataset, or of ``dataset``, a file or hub name."""
        if name is None and dataset in (None, cls.DATASET):
            name = cls.CONFIG
        return load_rows(dataset or cls.DATASET, split=split or "train", name=name)

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        """The start of a conversation: "query", and the columns that the scorer reads; ``number`` is for errors."""
        return to_prompt(row, number=number)

    @classmethod
    def row_with_reference(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        """`to_prompt` of a row: "query" and "answer". Raises DataError naming a row without a reference."""
        prompt = to_prompt(row, number=number)
        if "answer" not in prompt:
            raise DataError(
                f"{cls.__name__}: {row_label(number)} must have a reference column, one of "
                f"{', '.join(REFERENCE_COLUMNS)}: its columns are {', '.join(row)}.{did_you_mean('answer', row)}"
            )
        if not isinstance(prompt["answer"], str):
            raise DataError(
                f"{cls.__name__}: the reference must be text: {place_of(row, number)} has {prompt['answer']!r:.80}."
            )
        return prompt

    @classmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None) -> Transform:
        """The transform that writes the reward."""
        return cls.SCORER(tokenizer=tokenizer)

    @classmethod
    def about(cls, eval_split: str | None, *, at_once: int, **options: Any) -> str:
        """What the plan of a run says of the task; ``eval_split`` is measured, ``options`` are the environment's, and
        ``at_once`` the most conversations at a time.
        """
        return ""

    @classmethod
    def prompt_rows(cls, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """`prompt_row` of every row, counted from 1."""
        return [cls.prompt_row(row, number) for number, row in enumerate(checked_rows(rows, cls.__name__), 1)]


def row_label(number: int | None) -> str:
    """The name of a row in an error message."""
    return "a row" if number is None else f"row {number} of the dataset"
