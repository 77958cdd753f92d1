"""Conversations as ids, masks and dicts of them: what ``History.apply_chat_template`` returns that is not text.

Text and spans are the work of `llmrl.data.llm.codec`, media that of `llmrl.data.llm.multimodal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.masks import rows_to_tensors, spans_to_masks
from llmrl.data.llm.template_text import Chat, Tools
from llmrl.data.ragged.padding import pad_rows
from llmrl.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["as_dict", "as_ids", "check_request", "encode_rows"]

_WHO = "History.apply_chat_template"


def check_request(
    *,
    tokenize: bool,
    add_generation_prompt: bool,
    continue_final_message: bool,
    padding: bool,
    truncation: bool,
    return_tensors: str | None,
    return_dict: bool,
    return_mask: bool,
) -> None:
    """Raises ConfigError for settings that exclude each other, or that would have no effect."""
    if continue_final_message and (add_generation_prompt or return_mask):
        raise ConfigError(
            f"{_WHO}: continue_final_message must come without a generation prompt and without a mask: got one; pass "
            "add_generation_prompt=False."
        )
    if return_tensors not in (None, "pt"):
        raise ConfigError(f"{_WHO}: return_tensors must be 'pt' or None: got {return_tensors!r}.")
    if return_mask and not return_dict:
        raise ConfigError(f"{_WHO}: a mask is returned in a dict: got return_dict=False.")
    for name, value in (("padding", padding), ("truncation", truncation)):
        if not isinstance(value, bool):
            raise ConfigError(
                f"{_WHO}: {name} must be True or False: got {value!r}; True pads to the longest row, or cuts at the "
                "tokenizer's model_max_length."
            )
    of_ids = {
        "return_assistant_tokens_mask": return_mask,
        "return_dict": return_dict,
        "return_tensors": return_tensors is not None,
        "padding": padding,
        "truncation": truncation,
    }
    asked = [name for name, is_asked in of_ids.items() if is_asked]
    if asked and not tokenize:
        raise ConfigError(
            f"{_WHO}: {asked[0]} is about ids, and text was asked for: pass tokenize=True, or leave it out."
        )


def encode_rows(
    codec: ChatCodec,
    chats: Sequence[Chat],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Tools | None,
    return_mask: bool,
    truncation: bool,
) -> list[dict[str, Tensor]]:
    """ "input_ids" int64[T], "attention_mask" bool[T] and, with ``return_mask``, "assistant_masks" bool[T] per row."""
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    spans = None
    if return_mask:
        texts, spans = codec.render_with_spans(chats, **options)
    else:
        texts = codec.render(chats, continue_final_message=continue_final_message, **options)
    ids, token_spans = codec.encode_with_spans(texts, spans)
    length = codec.tokenizer.model_max_length if truncation else None
    columns = {"input_ids": [row[:length] for row in rows_to_tensors(ids)]}
    columns["attention_mask"] = [torch.ones(len(row), dtype=torch.bool) for row in columns["input_ids"]]
    if return_mask:
        columns["assistant_masks"] = [row[:length] for row in spans_to_masks(token_spans, [len(row) for row in ids])]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_ids(rows: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase, *, padding: bool) -> Any:
    """A list of int64[T_i]; with ``padding`` int64[B, T], padded on the tokenizer's side."""
    return pad_rows(rows, value=_pad_token_id(tokenizer), side=tokenizer.padding_side) if padding else list(rows)


def as_dict(
    rows: Sequence[dict[str, Tensor]], tokenizer: PreTrainedTokenizerBase, *, padding: bool, squeeze: bool
) -> TensorDictBase:
    """A lazy stack of rows, or with ``padding`` a dense batch; the row itself with ``squeeze``."""
    if not rows:
        raise ShapeError(f"{_WHO}: a dict must hold at least one conversation: got an empty batch.")
    if not padding:
        made = [TensorDict._new_unsafe(row, batch_size=torch.Size([])) for row in rows]
        return made[0] if squeeze else LazyStackedTensorDict(*made)
    batch = TensorDict({}, batch_size=[len(rows)])
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in ("input_ids", "attention_mask", "assistant_masks"):
            value = _pad_token_id(tokenizer) if name == "input_ids" else False
            batch[name] = pad_rows(values, value=value, side=tokenizer.padding_side)
        elif len({value.shape for value in values}) == 1:
            batch[name] = torch.stack(values)
        else:
            raise ShapeError(
                f"{_WHO}: entries of a processor must have one shape to be padded: {name!r} has "
                f"{sorted({tuple(value.shape) for value in values})}; leave padding=False."
            )
    return batch[0] if squeeze else batch


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{_WHO}: padding needs a tokenizer with a pad token: got none; set tokenizer.pad_token = "
            "tokenizer.eos_token (masks come from lengths), or leave padding=False."
        )
    return tokenizer.pad_token_id
