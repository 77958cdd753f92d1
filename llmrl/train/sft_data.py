"""Conversations for SFT: rows of a dataset, rendered and tokenised once, with the tokens to train marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.llm.dataset_files import load_rows, to_messages
from llmrl.envs.llm.tasks.colours import colours_demonstrations
from llmrl.envs.llm.tasks.sums import big_sums_demonstrations, sums_demonstrations
from llmrl.errors import DataError, TemplateError
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.modules.llm.vision import MEDIA, Media, has_images, write_media
from llmrl.train.settings import SFTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizedChats", "marked_pieces", "tokenize_chats"]

_EMBEDDED = {"sums": sums_demonstrations, "big_sums": big_sums_demonstrations, "colours": colours_demonstrations}
_AT_ONCE = 1024  # conversations per call of the tokenizer


@dataclass
class TokenizedChats:
    """``ids`` int64[T] and ``masks`` bool[T] per row: True where the token is trained; ``media`` of each row, where the
    model reads images.
    """

    source: str
    ids: list[Tensor]
    masks: list[Tensor]
    renderer: Renderer
    media: list[Media] = field(default_factory=list)
    num_cut: int = 0  # rows that were longer than allowed, and cut
    num_dropped: int = 0  # pieces of them without a trained token

    def __len__(self) -> int:
        return len(self.ids)

    def as_rows(self) -> TensorDict:
        """A batch of ("tokens", "full") and ("masks", "all_assistant_mask"), and "media"."""
        rows = {
            "tokens": Tokens.from_rows({"full": self.ids}),
            "masks": Masks.from_rows({"all_assistant_mask": self.masks}),
        }
        if self.media:
            rows[MEDIA] = write_media(self.media, [len(self.ids)])
        return TensorDict(rows, batch_size=[len(self.ids)])

    def trained_share(self) -> float:
        return sum(int(mask.sum()) for mask in self.masks) / sum(map(len, self.ids))

    def samples(self, count: int) -> list[list[tuple[str, bool]]]:
        """The first conversations as pieces of text, each with whether it is trained."""
        tokenizer = self.renderer.tokenizer
        return [
            marked_pieces(tokenizer, ids, mask) for ids, mask in zip(self.ids[:count], self.masks[:count], strict=True)
        ]


def marked_pieces(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor) -> list[tuple[str, bool]]:
    """The text of a token stream, cut where ``mask`` changes."""
    changes = (mask[1:] != mask[:-1]).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[start:end].tolist()), bool(mask[start]))
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]


def tokenize_chats(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedChats:
    """The data of ``config``.

    Raises  DataError for data that are missing, empty or too long, or have a row without an assistant turn;
            TemplateError if the template does not say what the assistant wrote
    """
    data = config.data
    if data.path in _EMBEDDED:
        rows = _EMBEDDED[data.path](data.split)
    else:
        rows = load_rows(data.path, split=data.split, name=data.name)
    count = min(data.rows or len(rows), len(rows))
    renderer = Renderer(tokenizer)
    chats = TokenizedChats(data.path, [], [], renderer)
    for start in range(0, count, _AT_ONCE):
        block = [rows[i] for i in range(start, min(start + _AT_ONCE, count))]
        messages = [
            to_messages(
                row,
                number=number,
                prompt_column=data.prompt_column,
                completion_column=data.completion_column,
                system_prompt=data.system_prompt,
            )
            for number, row in enumerate(block, start + 1)
        ]
        try:
            rows_of_ids = renderer.render(messages)
        except TemplateError as error:
            raise TemplateError(f"{data.path}, conversations from row {start + 1} on: {error}") from error
        for number, rendered in enumerate(rows_of_ids, start + 1):
            mask = rendered.assistant_mask
            if data.train_on == "last":
                mask = torch.zeros_like(mask)
                mask[slice(*rendered.spans[-1])] = True
            _add(chats, rendered, mask, number, config)
    if not chats.ids:
        raise DataError(
            f"{data.path}: no token is left to train: cutting to max_length={config.max_length} dropped all of it."
        )
    return chats


def _add(chats: TokenizedChats, rendered: Rendered, mask: Tensor, number: int, config: SFTConfig) -> None:
    limit, ids, media = config.max_length, rendered.ids, rendered.media
    if len(ids) <= limit:
        chats.ids.append(ids)
        chats.masks.append(mask)
        chats.media += [] if media is None else [media]
        return
    if config.too_long == "error" or has_images([media] if media else None):  # half an image is none
        raise DataError(
            f"{config.data.path}: a conversation must be at most max_length = {limit} tokens long: row {number} has "
            f"{len(ids)}; raise max_length, or choose too_long=split or too_long=truncate."
        )
    chats.num_cut += 1
    # a piece begins with the last token of the one before: the first token of a row has no log-prob, and is not trained
    starts = range(0, len(ids) - 1, max(limit - 1, 1)) if config.too_long == "split" else (0,)
    for start in starts:
        piece = mask[start : start + limit].clone()
        piece[0] &= start == 0
        if piece.any():
            chats.ids.append(ids[start : start + limit])
            chats.masks.append(piece)
            chats.media += [] if media is None else [media]
        else:
            chats.num_dropped += 1
