"""What an environment carried from the last turn to this one: read back from the prompt side of a batch.

An environment that steps a batch leaves, for every row, ("tokens", "prompt") and ("tokens", "covered") of the turn
before, with ("masks", "prompt_assistant_mask") and ("log_probs", "prompt" | "plain"). A row without a past has no ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.modules.llm.policies.containers import field_rows, is_ragged
from llmrl.modules.llm.policies.modes import Mode, Prompts, unpadded_rows
from llmrl.modules.llm.policies.stream import Stream

__all__ = ["carried_texts", "encode_prompts", "read_stream"]


def read_stream(td: TensorDictBase, keys: Mapping[str, str], mode: str, prompts: Sequence[Any]) -> Stream | None:
    """The stream of earlier turns; None where this turn is the first.

    keys     names of the containers in the batch
    prompts  what the mode read: in tokens mode these are the ids themselves
    """
    containers = (td.get(keys[name], None) for name in ("tokens", "masks", "log_probs"))
    tokens, masks, log_probs = (getattr(container, "_tensordict", container) for container in containers)
    attention = None if masks is None or is_ragged(masks) else masks.get("prompt_attention_mask", None)

    def rows(holder: TensorDictBase | None, field: str) -> list[Tensor] | None:
        if holder is None or field not in holder.keys():
            return None
        return unpadded_rows(holder, field, attention)

    mask, scores, plain = rows(masks, "prompt_assistant_mask"), rows(log_probs, "prompt"), rows(log_probs, "plain")
    if mode == "tokens":
        if mask is None:
            return None
        ids = [row[: len(carried)] for row, carried in zip(prompts, mask, strict=True)]
        return Stream(ids, mask, scores, [len(row) for row in ids], plain)
    ids, covered = rows(tokens, "prompt"), rows(tokens, "covered")
    if ids is None or covered is None:
        return None
    answered = rows(tokens, "response") is not None
    if answered and mask is None:
        return None  # this very prompt was answered before, and is rendered again
    return Stream(ids, mask, scores, [int(value) for value in covered], None if answered else plain, answered)


def carried_texts(td: TensorDictBase, text_key: str, mode: str, stream: Stream) -> list[str] | None:
    """The text of the stream, where the environment carried it; a row that starts afresh has none yet."""
    text = td.get(text_key, None) if mode == "history" else None
    rows = None if text is None else field_rows(getattr(text, "_tensordict", text), "prompt")
    if rows is None:
        return None
    return [row if len(ids) else "" for row, ids in zip(rows, stream.ids, strict=True)]


def encode_prompts(mode: Mode, prompts: Prompts, stream: Stream | None) -> tuple[list[Tensor], list[int]]:
    """The ids that the engine is given, and how many of them this turn adds: only those are encoded."""
    if stream is None:
        ids = mode.encode(prompts.rows)
        return ids, [len(row) for row in ids]
    if stream.complete:
        return stream.ids, [0] * len(stream.ids)
    fresh = [row for row, ids in enumerate(stream.ids) if not len(ids)]
    grown = [row for row, ids in enumerate(stream.ids) if len(ids)]
    prompt_ids: list[Tensor] = list(stream.ids)
    if fresh:
        for row, ids in zip(fresh, mode.encode([prompts.rows[row] for row in fresh]), strict=True):
            prompt_ids[row] = ids
    if grown:
        rows = [prompts.rows[row] for row in grown]
        for row, added in zip(grown, mode.extend(stream.select(grown), rows), strict=True):
            prompt_ids[row] = torch.cat([stream.ids[row], added])
    return prompt_ids, [len(ids) - len(before) for ids, before in zip(prompt_ids, stream.ids, strict=True)]
