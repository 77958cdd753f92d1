"""From the record of a turn to containers: ragged rows, or padded tensors whose prompt sits left of the response.

The one place that lays out what the wrapper writes; which ids and masks there are is ``stream``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from llmrl.modules.llm.policies.stream import TurnRecord
from llmrl.padding import pad_rows

__all__ = ["padded_containers", "ragged_containers"]

Containers = tuple[Masks, Tokens, LogProbs | None]


def ragged_containers(
    record: TurnRecord, carried_masks: list[Tensor] | None, covered: list[int] | None, batch_size: Sequence[int]
) -> Containers:
    """Masks, Tokens and LogProbs as rows."""
    masks = {"all_attention_mask": record.attention_mask, "all_assistant_mask": record.assistant_mask}
    if carried_masks is not None:
        masks["prompt_assistant_mask"] = carried_masks
    tokens: dict[str, Any] = {"prompt": record.prompt, "response": record.response, "full": record.full}
    if covered is not None:
        tokens["covered"] = torch.tensor(covered)
    log_probs = None
    if record.full_log_probs is not None:
        columns = {
            "prompt": record.prompt_log_probs,
            "response": record.response_log_probs,
            "full": record.full_log_probs,
        }
        if record.plain_log_probs is not None:
            columns["plain"] = record.plain_log_probs
        log_probs = LogProbs.from_rows(columns, batch_size)
    return Masks.from_rows(masks, batch_size), Tokens.from_rows(tokens, batch_size), log_probs


def padded_containers(
    record: TurnRecord,
    carried_masks: list[Tensor] | None,
    covered: list[int] | None,
    batch_size: Sequence[int],
    pad_token_id: int,
) -> Containers:
    """Masks, Tokens and LogProbs as dense tensors: prompt [B, P] left-padded, response [B, R] right-padded, full [B, P
    + R].
    """
    split = [len(prompt) for prompt in record.prompt]

    def dense(rows: list[Tensor], side: str, value: float = 0) -> Tensor:
        return pad_rows(rows, value=value, side=side)  # type: ignore[arg-type]

    def around(rows: list[Tensor], value: float = 0) -> Tensor:
        """Rows of prompt and response, padded at both ends so that the responses begin in one column."""
        before = dense([row[:at] for row, at in zip(rows, split, strict=True)], "left", value)
        return torch.cat(
            [before, dense([row[at:] for row, at in zip(rows, split, strict=True)], "right", value)], dim=1
        )

    def shaped(columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.reshape((*batch_size, *value.shape[1:])) for name, value in columns.items()}

    masks = {"all_attention_mask": around(record.attention_mask), "all_assistant_mask": around(record.assistant_mask)}
    if carried_masks is not None:
        masks["prompt_assistant_mask"] = dense(carried_masks, "left")
        masks["prompt_attention_mask"] = masks["all_attention_mask"][:, : max(split)]
    tokens = {
        "prompt": dense(record.prompt, "left", pad_token_id),
        "response": dense(record.response, "right", pad_token_id),
        "full": around(record.full, pad_token_id),
    }
    if covered is not None:
        tokens["covered"] = torch.tensor(covered)
    log_probs = None
    if record.full_log_probs is not None:
        columns = {
            "prompt": dense(record.prompt_log_probs, "left"),
            "response": dense(record.response_log_probs, "right"),
            "full": around(record.full_log_probs),
        }
        if record.plain_log_probs is not None:
            columns["plain"] = around(record.plain_log_probs)
        log_probs = LogProbs.from_padded(shaped(columns), batch_size)
    return Masks.from_padded(shaped(masks), batch_size), Tokens.from_padded(shaped(tokens), batch_size), log_probs
