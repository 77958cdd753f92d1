"""Cuts a conversation off from the ids of its past, for transforms that edit what was said.

The next turn is then rendered anew by the policy's wrapper and starts a training record of its own (docs/keys.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from llmrl.modules.llm.policies.containers import LogProbs, Masks, Text, Tokens, entries, field_rows
from llmrl.modules.llm.policies.modes import unpadded_rows

__all__ = ["begin_anew"]

_STREAMS = {
    "tokens": (Tokens, ("prompt", "covered")),
    "masks": (Masks, ("prompt_assistant_mask",)),
    "log_probs": (LogProbs, ("prompt", "plain")),
}


def begin_anew(next_td: TensorDictBase, rows: Sequence[int], view: str) -> None:
    """Leaves the prompts of these rows without ids, masks and log-probs, in place; the other rows go on.

    Reads   ``view``: the one that was edited ("history", "text" or "tokens"), which stays as it is
    Writes  ("tokens", "prompt" | "covered"), ("masks", "prompt_assistant_mask"), ("log_probs", "prompt" | "plain") and,
            where the view is the history, ("text", "prompt"): empty in these rows. Padded containers become ragged
    """
    chosen = set(rows)
    masks = entries(next_td.get("masks", None))
    attention = None if masks is None else field_rows(masks, "prompt_attention_mask")
    for name, (container, fields) in _STREAMS.items():
        holder = entries(next_td.get(name, None))
        if holder is None:
            continue
        columns = {}
        for field in fields:
            if field in holder.keys():
                values = unpadded_rows(holder, field, attention)
                if (name, view) != ("tokens", "tokens"):
                    values = [_empty(value) if row in chosen else value for row, value in enumerate(values)]
                columns[field] = values
        next_td.set(name, container.from_rows(columns, next_td.batch_size))
    if view == "history" and (text := next_td.get("text", None)) is not None:
        texts = ["" if row in chosen else value for row, value in enumerate(text.rows("prompt"))]
        next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))


def _empty(value: torch.Tensor) -> torch.Tensor:
    return value[:0] if value.ndim else torch.zeros_like(value)  # "covered" is a number
