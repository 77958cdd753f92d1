"""`PairwiseDataset` and `PromptData`: pairs of answers, and prompts with an answer, in memory-mapped rows.

The rows of a file are read as `llmrl reward` and `llmrl sft` read them. If the tokenizer has a chat template, it
renders the conversations; otherwise prompt and answer are joined unchanged, followed by an end-of-sequence id. If
neither has white space at the seam, a line break joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from llmrl.data.llm.codec import codec_for
from llmrl.data.llm.images import take_images
from llmrl.data.llm.message_forms import is_trained
from llmrl.data.llm.placed_rows import name_refused
from llmrl.data.llm.rlhf.source import Source, blocks_of
from llmrl.data.llm.rlhf.tokenizing import encode_answers, load_tokenizer, padding_id, same_width
from llmrl.data.llm.row_reading import CHAT_COLUMNS, REFERENCE_COLUMNS, place_of
from llmrl.data.llm.rows import ReadRow, read_conversation, read_pair
from llmrl.data.llm.templates import find_template
from llmrl.errors import ConfigError, DataError, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.data.llm.rlhf.cache import Block

IGNORED = -100  # label of positions that losses ignore
Chat = list[dict[str, Any]]
Row = Mapping[str, Any]
Unusable = Literal["error", "drop"]


class RewardData(TensorClass["nocast"]):
    """The input of a reward model, and its output: the rewards after each token and after the last one.

    ``input_ids``, ``attention_mask`` int64[B, T]; ``rewards`` float32[B, T, 1]; ``end_scores`` float32[B, 1].
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None


class _FromDataset:
    """Adds `from_dataset`: ``_chats`` reads the conversations of a row, ``_columns`` makes columns of their ids."""

    @classmethod
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | Path | None = None,
        max_length: int = 550,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        valid_size: int | None = None,
        unusable: Unusable = "error",
        **columns: str | None,
    ) -> Self:
        """The rows of one split, tokenised by the first call and opened by later ones.

        Arguments are those of `TokenizedDatasetLoader`; ``columns`` those of `to_pair` for pairs and of `to_messages`
        for prompts, such as ``prompt_column``.

        unusable  "drop" leaves out, and counts in a warning, rows that are longer than ``max_length``, and pairs that
                  cannot be compared
        Raises    DataError naming row and column for a missing column, an empty answer, equal answers, or a
                  conversation that is too long
        """
        name = str(dataset_name or cls._default_dataset)
        source = Source(name, split, root_dir, from_disk, valid_size, num_workers)
        rows = _Rows(load_tokenizer(tokenizer), max_length, unusable)

        def build() -> Iterator[Block]:
            for count, groups in rows.groups(source, lambda row, number: cls._chats(row, number, columns)):
                yield count, cls._columns(rows, groups)

        recipe = {"kind": cls.__name__, "columns": columns, "unusable": unusable}
        return cls._of_columns(source.tokenised(rows.tokenizer, max_length, build, recipe))


class PairwiseDataset(_FromDataset, TensorClass["nocast"]):
    """Pairs of conversations that differ in their last answer: row i of one belongs to row i of the other."""

    chosen_data: RewardData
    rejected_data: RewardData

    _default_dataset = "CarperAI/openai_summarize_comparisons"

    @staticmethod
    def _chats(row: Row, number: int, columns: Mapping[str, str | None]) -> list[Chat]:
        return _trained(read_pair(row, number=number, **columns), row, number)

    @staticmethod
    def _columns(rows: _Rows, groups: list[list[_Ids]]) -> Mapping[str, Any]:
        sides = {
            name: rows.same_width([group[side].ids for group in groups])
            for side, name in enumerate(("chosen_data", "rejected_data"))
        }
        return TensorDict(sides, batch_size=[len(groups)])

    @classmethod
    def _of_columns(cls, td: TensorDict) -> PairwiseDataset:
        sides = {name: RewardData(**td[name], batch_size=td.batch_size) for name in ("chosen_data", "rejected_data")}
        return cls(**sides, batch_size=td.batch_size)


class PromptData(_FromDataset, TensorClass["nocast"]):
    """Prompts with an answer each.

    ``input_ids``, ``attention_mask`` int64[B, T] of both, padded on the right; ``prompt_rindex`` int64[B], the position
    of the prompt's last id; ``labels`` int64[B, T], the ids of the answer, -100 elsewhere. ``logits`` and ``loss`` are
    outputs of a model.

    In rows of `from_dataset` the answer is the last turn of "messages", or a column such as "completion", "answer" or
    "label"; of a pair, the chosen answer.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    _default_dataset = "CarperAI/openai_summarize_tldr"

    def mask_label(self, pad_token_id: int = 50256) -> PromptData:
        """The prompts alone: ``pad_token_id`` in place of the answers, and no labels.

        >>> ids, last = torch.tensor([[5, 6, 7, 8]]), torch.tensor([1])
        >>> PromptData(ids, torch.ones_like(ids), last, batch_size=[1]).mask_label(pad_token_id=0).input_ids
        tensor([[5, 6, 0, 0]])
        """
        place_T = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        kept_BT = (place_T <= self.prompt_rindex.unsqueeze(-1)) & self.attention_mask.bool()
        return type(self)(
            input_ids=self.input_ids.masked_fill(~kept_BT, pad_token_id),
            attention_mask=kept_BT.to(self.attention_mask.dtype),
            prompt_rindex=self.prompt_rindex,
            loss=self.loss,
            batch_size=self.batch_size,
            device=self.device,
        )

    @staticmethod
    def _chats(row: Row, number: int, columns: Mapping[str, str | None]) -> list[Chat]:
        known = (*CHAT_COLUMNS, "completion", *REFERENCE_COLUMNS)
        if "completion_column" not in columns and not any(row.get(name) is not None for name in known):
            if "chosen" in row and "rejected" in row:
                return _trained(read_pair(row, number=number, **columns), row, number)[:1]
            if row.get("label") is not None:
                columns = {**columns, "completion_column": "label"}
        [chat] = _trained(read_conversation(row, number=number, **columns), row, number)
        if chat[-1]["role"] != "assistant" or not (chat[-1]["content"] or chat[-1].get("tool_calls")):
            where = place_of(row, number)
            raise DataError(f"dataset: {where} must end with an answer of the assistant: it has {chat[-1]!r:.80}.")
        return [chat]

    @staticmethod
    def _columns(rows: _Rows, groups: list[list[_Ids]]) -> Mapping[str, Any]:
        columns = rows.same_width([own.ids for (own,) in groups])
        places_B2 = torch.tensor([[own.start, own.end] for (own,) in groups], dtype=torch.int64).view(-1, 2)
        start_B1, end_B1 = places_B2.split(1, -1)
        place_T = torch.arange(rows.max_length)
        answer_BT = (place_T >= start_B1) & (place_T < end_B1)
        labels_BT = columns["input_ids"].masked_fill(~answer_BT, IGNORED)
        return {**columns, "prompt_rindex": start_B1.squeeze(-1) - 1, "labels": labels_BT}

    @classmethod
    def _of_columns(cls, td: TensorDict) -> PromptData:
        return cls(**td, batch_size=td.batch_size)


def _trained(read: ReadRow, row: Row, number: int) -> list[Chat]:
    """The conversations of a row. Raises DataError if a flag leaves the row out of the loss."""
    if not (read.is_trained and all(is_trained(chat[-1]) for chat in read.chats)):
        raise DataError(f"dataset: {place_of(row, number)} is left out by its weight; leave it out of the data.")
    return list(read.chats)


class _Ids(NamedTuple):
    """A conversation, and where its last answer begins and ends."""

    ids: list[int]
    start: int
    end: int


class _Rows:
    """Turns rows into columns of one width, with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, unusable: Unusable) -> None:
        if unusable not in ("error", "drop"):
            raise ConfigError(f"dataset: unusable must be 'error' or 'drop': got {unusable!r}.")
        self.tokenizer, self.max_length, self.unusable = tokenizer, max_length, unusable
        self.codec = codec_for(tokenizer, find_template(tokenizer)) if tokenizer.chat_template else None
        self.end = None if self.codec else tokenizer.eos_token_id  # of plain texts

    def groups(
        self, source: Source, chats_of: Callable[[Row, int], list[Chat]]
    ) -> Iterator[tuple[int, list[list[_Ids]]]]:
        """Block by block: the number of rows read, and the ids of the conversations of each row that is kept."""
        refused: list[DataError] = []
        kept = 0

        def usable(make: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return make(*arguments)
            except DataError as error:
                if self.unusable == "error":
                    raise
                refused.append(error)
                return None

        for first, block in blocks_of(*source.rows()):
            rows = [(place_of(row, n), usable(chats_of, row, n)) for n, row in enumerate(block, first)]
            rows = [(place, chats) for place, chats in rows if chats]
            # All conversations of a block are encoded in one call: per row it would be many times slower.
            ids = iter(self._encode([(place, chat) for place, chats in rows for chat in chats]))
            found = [usable(self._checked, [next(ids) for _ in chats], place) for place, chats in rows]
            found = [group for group in found if group]
            kept += len(found)
            yield len(block), found
        if not kept:
            raise DataError(f"{source.name}: no row is left. The first that was left out: {refused[0]}")

    def _encode(self, placed: list[tuple[str, Chat]]) -> list[_Ids]:
        for place, chat in placed:
            if any(take_images(chat)[1]):
                raise DataError(f"dataset: tokenised rows hold no images: {place} has some.")
        if self.codec is None:
            encoded = []
            for ids, start in encode_answers(self.tokenizer, *_plain_texts(placed)):
                if self.end is not None and ids[-1:] != [self.end]:
                    ids.append(self.end)
                encoded.append(_Ids(ids, start, len(ids)))
            return encoded
        chats = [chat for _, chat in placed]
        try:
            texts, spans = self.codec.render_with_spans(chats)
            ids, spans = self.codec.encode_with_spans(texts, spans)
        except TemplateError as error:
            raise name_refused(error, chats, [place for place, _ in placed], self.codec.render_with_spans) from error
        return [_Ids(own, *found[-1]) for own, found in zip(ids, spans, strict=True)]

    def _checked(self, group: list[_Ids], place: str) -> list[_Ids]:
        for ids, start, end in group:
            # The end-of-sequence id that was added to a plain text is not a token of the answer.
            if start >= end - (self.end is not None):
                raise DataError(f"dataset: an answer must have a token: one of {place} has none.")
            if len(ids) > self.max_length:
                what = f"has {len(ids)} tokens, {start} of them before the answer"
                raise DataError(
                    f"dataset: a conversation must be at most max_length = {self.max_length} tokens long: one of "
                    f"{place} {what}; raise max_length, or pass unusable='drop'."
                )
        # Different texts can have equal ids: a tokenizer may normalise, or drop unknown characters.
        if len(group) == 2 and group[0].ids == group[1].ids:
            raise DataError(f"dataset: the answers of a pair must differ in their tokens: those of {place} do not.")
        return group

    def same_width(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        ids, mask = same_width(rows, self.max_length, padding_id(self.tokenizer))
        return {"input_ids": ids, "attention_mask": mask}


def _plain_texts(placed: list[tuple[str, Chat]]) -> tuple[list[str], list[str]]:
    """The prompts and the answers of conversations without a template."""
    prompts, answers = [], []
    for place, chat in placed:
        if [message["role"] for message in chat] != ["user", "assistant"]:
            raise DataError(
                f"dataset: without a chat template a row is a prompt and an answer: {place} is a "
                f"conversation ({', '.join(message['role'] for message in chat)}); use a tokenizer that has one."
            )
        prompt, answer = (message["content"] for message in chat)
        seam = "" if prompt[-1:].isspace() or answer[:1].isspace() or not prompt else "\n"
        prompts.append(prompt + seam)
        answers.append(answer)
    return prompts, answers
