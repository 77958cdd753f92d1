"""Conversations with images, audio or video -> ids, through a processor of the Transformers library.

The processor loads the media and writes as many placeholder ids as they need, so it also tokenises. What this file adds
is masks with the end-of-turn token, refusal of control tokens inside messages, and rows instead of one padded batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.template_text import Chat, Tools
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

__all__ = ["is_processor", "process_rows"]


def is_processor(tokenizer: Any) -> bool:
    """Whether this is a processor, which holds a tokenizer, and not a tokenizer."""
    return hasattr(tokenizer, "tokenizer") and hasattr(tokenizer, "apply_chat_template")


def process_rows(
    processor: ProcessorMixin,
    codec: ChatCodec,
    chats: Sequence[Chat],
    *,
    add_generation_prompt: bool = False,
    return_mask: bool = False,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Tensor]]:
    """One dict per conversation, with what the processor makes of it.

    Writes  "input_ids"        int64[T]
            "attention_mask"   bool[T]
            "assistant_masks"  bool[T], with ``return_mask``: True where the assistant wrote the token
            and the processor's own entries, such as "pixel_values", with the shapes that it gives one conversation
    Raises  TemplateError if a message spells a control token (the processor would take it for a real one), or if a mask
            is asked for and the template has no generation block
    """
    if return_mask and not codec.template.marks_generation:
        raise TemplateError(
            f"History.apply_chat_template: a mask of a conversation with media needs generation blocks: template "
            f"{codec.template.name!r} has none; put {{% generation %}}...{{% endgeneration %}} around the answers."
        )
    codec.refuse_markers(chats)
    rows = []
    for chat in chats:
        made = processor.apply_chat_template(
            [chat],
            chat_template=codec.template.jinja,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=return_mask,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **(template_kwargs or {}),
        )
        columns: dict[str, Any] = dict(made.items())
        ids = columns["input_ids"][0]
        columns["input_ids"] = ids
        columns["attention_mask"] = torch.ones(len(ids), dtype=torch.bool)
        if return_mask:
            columns["assistant_masks"] = _with_end(torch.as_tensor(columns["assistant_masks"]).view(-1), ids, codec)
        rows.append(columns)
    return rows


def _with_end(mask: Tensor, ids: Tensor, codec: ChatCodec) -> Tensor:
    """The mask with each run moved to just after, or just before, the end-of-turn ids that close it."""
    mask, end = mask.bool().clone(), codec.end_of_turn_ids
    if not end:
        return mask
    edges = torch.diff(mask.int(), append=torch.zeros(1, dtype=torch.int32))
    for last in (edges == -1).nonzero().flatten().tolist():
        after = last + 1
        if ids[after : after + len(end)].tolist() == end:
            mask[after : after + len(end)] = codec.include_end_of_turn
        elif ids[after - len(end) : after].tolist() == end:
            mask[after - len(end) : after] = codec.include_end_of_turn
    return mask
