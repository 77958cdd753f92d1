"""Conversations for SFT: rows of a dataset, rendered and tokenised once, with a mask of the trained tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.placed_rows import name_refused
from llmrl.data.llm.row_reading import place_of
from llmrl.data.llm.rows import ReadRow, read_conversation
from llmrl.envs.llm.tasks.embedded import EMBEDDED_TASKS
from llmrl.errors import DataError, TemplateError
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.modules.llm.vision import MEDIA, Media, has_images, write_media
from llmrl.run.console import Sample
from llmrl.train.data.lengths import RowLengths
from llmrl.train.data.record import DataRecord
from llmrl.train.settings.sft import SFTConfig, SFTData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.train.settings.preferences import PreferenceData

_EMBEDDED = {name: task.demonstrations for name, task in EMBEDDED_TASKS.items()}
AT_ONCE = 1024  # rows per call of the tokenizer


@dataclass
class TokenizedRows:
    """``ids`` int64[T] and ``masks`` bool[T] (True: the token counts in the loss) of each row of ``source``."""

    source: str
    renderer: Renderer
    ids: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)  # one per row, if the model reads images
    num_too_long: int = 0  # rows that were longer than allowed
    num_left_out: int = 0  # rows that a flag leaves out, such as "weight": 0
    unused: dict[str, None] = field(default_factory=dict)  # columns that no conversation has, in their order
    held_out: TokenizedRows | None = None  # rows that are measured during training, not trained on
    margins: list[float] = field(default_factory=list)  # of pairs, if the data have them
    described: str = ""  # held-out rows: where they are from, in words
    unit: ClassVar[str]  # name of a row in messages

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def own_ids(self) -> list[Tensor]:
        """The ids of each row by which it is the same as another one."""
        return self.ids

    def as_rows(self) -> TensorDict:
        """A batch of ("tokens", "full"), ("masks", "all_assistant_mask") and `columns`."""
        rows = {
            "tokens": Tokens.from_rows({"full": self.ids}),
            "masks": Masks.from_rows({"all_assistant_mask": self.masks}),
        }
        return TensorDict(rows | self.columns(), batch_size=[len(self.ids)])

    def columns(self) -> dict[str, Any]:
        return {MEDIA: write_media(self.media, [len(self.ids)])} if self.media else {}

    @property
    def lengths(self) -> RowLengths:
        return RowLengths(tuple(map(len, self.ids)))

    @cached_property
    def record(self) -> DataRecord:
        """The record of ids and masks in their order, and of what the rows have beside them."""
        rows = ((f"{len(ids)} ".encode(), ids, mask) for ids, mask in zip(self.ids, self.masks, strict=True))
        values = (value for row in rows for value in row)
        return DataRecord.of(self.source, self.unit, len(self), itertools.chain(values, self._beside()))

    def _beside(self) -> Iterable[Any]:
        """What rows have beside ids and masks, in their order."""
        return (*self.media, *self.margins)

    def trained_share(self) -> float:
        return sum(int(mask.sum()) for mask in self.masks) / sum(map(len, self.ids))

    def note(self, row: ReadRow) -> bool:
        """Counts what is left out of a row; False if that is all of it."""
        self.unused |= dict.fromkeys(row.unused)
        self.num_left_out += not row.is_trained
        return row.is_trained

    def render(self, chats: Sequence[Sequence[Any]], places: Sequence[str]) -> list[Rendered]:
        """Renders conversations. Raises TemplateError that names the first refused one by its place."""
        try:
            return self.renderer.render(chats)
        except TemplateError as error:
            raise name_refused(error, chats, places, self.renderer.render) from error

    def left_out(self) -> str:
        """What the data have and training does not, in words."""
        count = self.num_left_out
        return f" · {count} row{'s' * (count != 1)} left out by their flags" if count else ""


@dataclass
class TokenizedChats(TokenizedRows):
    """Each row is a conversation."""

    unit: ClassVar[str] = "conversations"
    first_call: int | None = None  # the first conversation in which a tool is called

    def samples(self, count: int) -> list[Sample]:
        """The first conversations, one with a call among them if any has one, with the trained tokens marked."""
        shown = list(range(len(self.ids)))[:count]
        if shown and self.first_call is not None and self.first_call not in shown:
            shown[-1] = self.first_call
        rows = [(self.ids[row], self.masks[row]) for row in shown]
        return [Sample(marked_pieces(self.renderer.tokenizer, *row), label="trained") for row in rows]


def marked_pieces(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor) -> list[tuple[str, bool]]:
    """The decoded text of a token sequence, split where ``mask`` changes, with the mask of each piece."""
    changes = (mask[1:] != mask[:-1]).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[start:end].tolist()), bool(mask[start]))
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]


def load_split(data: SFTData | PreferenceData, split: str, embedded: Mapping[str, Callable[[str], Any]]) -> Any:
    """The rows of a split of an ``embedded`` task, a file, or a hub dataset."""
    if data.path in embedded:
        return embedded[data.path](split)
    return load_rows(data.path, split=split, name=data.name)


def last_answer(rendered: Rendered) -> Tensor:
    """bool[T]: True in the last answer of a conversation, including its end of turn."""
    mask = torch.zeros_like(rendered.assistant_mask)
    mask[slice(*rendered.spans[-1])] = True
    return mask


def tokenize_chats(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedChats:
    """The data of ``config``, tokenised.

    Raises  DataError for data that are missing, empty or too long, or have a row without an assistant turn;
            TemplateError if the template does not mark the assistant's tokens
    """
    data = config.data
    rows = load_split(data, data.split, _EMBEDDED)
    count = min(data.rows or len(rows), len(rows))
    columns = data.model_dump(include={"prompt_column", "completion_column", "system_prompt"})
    chats = TokenizedChats(data.path, Renderer(tokenizer))
    for start in range(0, count, AT_ONCE):
        numbers = range(start + 1, min(start + AT_ONCE, count) + 1)
        read = [(place_of(rows[n - 1], n), read_conversation(rows[n - 1], number=n, **columns)) for n in numbers]
        block = [(place, row.chats[0]) for place, row in read if chats.note(row)]
        rendered_rows = chats.render([chat for _, chat in block], [place for place, _ in block])
        for (place, chat), rendered in zip(block, rendered_rows, strict=True):
            mask = rendered.assistant_mask
            if data.train_on == "last":
                mask = mask & last_answer(rendered)
                if not mask.any():  # a flag leaves the last answer out
                    chats.num_left_out += 1
                    continue
            before = len(chats.ids)
            _add(chats, rendered, mask, place, config)
            if chats.first_call is None and any(message.get("tool_calls") for message in chat):
                chats.first_call = before if len(chats.ids) > before else None
    if not chats.ids:
        raise DataError(
            f"{data.path}: no token is left to train: cutting to max_length={config.max_length} dropped all of it"
            f"{chats.left_out()}."
        )
    return chats


def _add(chats: TokenizedChats, rendered: Rendered, mask: Tensor, place: str, config: SFTConfig) -> None:
    limit, ids, media = config.max_length, rendered.ids, rendered.media
    starts, is_too_long = range(1), len(ids) > limit
    if is_too_long:
        cannot = has_images([media] if media else None)
        if config.too_long == "error" or cannot:
            remedy = "a conversation with images cannot be cut: leave it out, or raise max_length"
            remedy = remedy if cannot else "raise max_length, or choose too_long=split or too_long=truncate"
            raise DataError(
                f"{place}: a conversation must be at most max_length = {limit} tokens long: it has {len(ids)}; "
                f"{remedy}."
            )
        chats.num_too_long += 1
        if config.too_long == "split":  # pieces overlap by a token, trained in the earlier one
            starts = range(0, len(ids) - 1, max(limit - 1, 1))
    # Pieces of a long conversation without a trained token are dropped.
    for start in starts:
        piece = mask[start : start + limit].clone()
        piece[0] &= start == 0  # the first token of a row has no log-prob
        if piece.any() or not is_too_long:
            chats.ids.append(ids[start : start + limit])
            chats.masks.append(piece)
            chats.media += [] if media is None else [media]
