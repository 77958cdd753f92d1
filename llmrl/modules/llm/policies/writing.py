"""From the record of a turn to containers: ragged rows, or padded tensors whose prompt sits left of the response.

The one place that lays out what the wrapper writes; which ids and masks there are is ``stream``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmrl.data.ragged.padding import pad_rows
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from llmrl.modules.llm.policies.stream import TurnRecord

__all__ = ["record_containers"]

_CONTAINERS = {"masks": Masks, "tokens": Tokens, "log_probs": LogProbs}


def record_containers(
    record: TurnRecord, covered: list[int] | None, batch_size: Sequence[int], pad_token_id: int | None
) -> dict[str, Any]:
    """The containers "masks", "tokens" and, where the record has them, "log_probs".

    Reads    covered       how much of the mode's view the ids cover; None in tokens mode
             pad_token_id  None: rows. Else dense tensors: prompt [B, P] left-padded, response [B, R] right-padded, full
                           [B, P + R]
    """
    columns = _ragged(record) if pad_token_id is None else _padded(record, pad_token_id)
    if covered is not None:
        columns["tokens"]["covered"] = torch.tensor(covered)
    if pad_token_id is None:
        return {name: _CONTAINERS[name].from_rows(fields, batch_size) for name, fields in columns.items()}
    return {
        name: _CONTAINERS[name].from_padded(
            {field: value.reshape((*batch_size, *value.shape[1:])) for field, value in fields.items()}, batch_size
        )
        for name, fields in columns.items()
    }


def _ragged(record: TurnRecord) -> dict[str, dict[str, Any]]:
    masks = {"all_attention_mask": record.attention_mask, "all_assistant_mask": record.assistant_mask}
    if record.carried_mask is not None:
        masks["prompt_assistant_mask"] = record.carried_mask
    columns: dict[str, dict[str, Any]] = {
        "masks": masks,
        "tokens": {"prompt": record.prompt, "response": record.response, "full": record.full},
    }
    if record.full_log_probs is not None:
        columns["log_probs"] = {
            "prompt": record.prompt_log_probs,
            "response": record.response_log_probs,
            "full": record.full_log_probs,
        }
        if record.plain_log_probs is not None:
            columns["log_probs"]["plain"] = record.plain_log_probs
    return columns


def _padded(record: TurnRecord, pad_token_id: int) -> dict[str, dict[str, Any]]:
    """The same columns, dense: prompts padded on the left, responses on the right, ``full`` at both ends."""
    split = [len(prompt) for prompt in record.prompt]

    def around(rows: list[Tensor], value: float) -> Tensor:
        """Rows of prompt and response, padded at both ends so that the responses begin in one column."""
        before = pad_rows([row[:at] for row, at in zip(rows, split, strict=True)], value=value, side="left")
        after = pad_rows([row[at:] for row, at in zip(rows, split, strict=True)], value=value, side="right")
        return torch.cat([before, after], dim=1)

    def dense(field: str, rows: list[Tensor], value: float) -> Tensor:
        if field.startswith("prompt"):
            return pad_rows(rows, value=value, side="left")
        return pad_rows(rows, value=value, side="right") if field == "response" else around(rows, value)

    columns = {
        name: {field: dense(field, rows, pad_token_id if name == "tokens" else 0) for field, rows in fields.items()}
        for name, fields in _ragged(record).items()
    }
    if record.carried_mask is not None:
        columns["masks"]["prompt_attention_mask"] = columns["masks"]["all_attention_mask"][:, : max(split)]
    return columns
