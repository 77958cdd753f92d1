"""What an environment carried from the last turn to this one: read back from the prompt side of a batch.

An environment that steps a batch leaves, for every row, ("tokens", "prompt") and ("tokens", "covered") of the turn
before, with ("masks", "prompt_assistant_mask") and ("log_probs", "prompt" | "plain"). A row without a past has no ids.
A row whose past can no longer be continued starts a new record: nothing of its old stream is in the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.errors import RewriteError
from llmrl.modules.llm.policies.containers import entries, field_rows
from llmrl.modules.llm.policies.modes import Mode, Prompts, unpadded_rows
from llmrl.modules.llm.policies.stream import Stream

__all__ = ["Encoded", "carried_texts", "count_rewritten", "encode_prompts", "read_stream"]

_log = logging.getLogger(__name__)


def read_stream(td: TensorDictBase, keys: Mapping[str, str], mode: str, prompts: Sequence[Any]) -> Stream | None:
    """The stream of earlier turns; None where this turn is the first.

    keys     names of the containers in the batch
    prompts  what the mode read: in tokens mode these are the ids themselves
    """
    containers = (td.get(keys[name], None) for name in ("tokens", "masks", "log_probs"))
    tokens, masks, log_probs = map(entries, containers)
    attention = None if masks is None else field_rows(masks, "prompt_attention_mask")

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
    if answered and (mask is None or not _has_answer(td, keys[mode])):
        # this very prompt was answered before, and is rendered again; or the ids are those of the turn before, left
        # behind where those of this turn were dropped: a new record
        return None
    return Stream(ids, mask, scores, [int(value) for value in covered], None if answered else plain, answered)


def carried_texts(td: TensorDictBase, text_key: str, mode: str, stream: Stream) -> list[str] | None:
    """The text of the stream, where the environment carried it; a row that starts afresh has none yet."""
    text = td.get(text_key, None) if mode == "history" else None
    rows = None if text is None else field_rows(entries(text), "prompt")
    if rows is None:
        return None
    return [row if len(ids) else "" for row, ids in zip(rows, stream.ids, strict=True)]


@dataclass
class Encoded:
    """What the engine is given, per row, and what it continues.

    ids        int64[P]
    num_new    how many of them, at the end, this turn adds: only those were encoded
    stream     what earlier turns left, without the rows that begin anew; None where all do
    rewritten  row -> why its earlier turns could not be continued as they were
    """

    ids: list[Tensor]
    num_new: list[int]
    stream: Stream | None
    rewritten: dict[int, RewriteError]

    def select(self, rows: Sequence[int]) -> Encoded:
        """The rows at these indices, which may repeat; what was rewritten is counted by then."""
        stream = None if self.stream is None else self.stream.select(rows)
        return Encoded([self.ids[row] for row in rows], [self.num_new[row] for row in rows], stream, {})

    @property
    def begins_record(self) -> list[bool]:
        """Per row, whether a training record begins with this turn."""
        return [True] * len(self.ids) if self.stream is None else self.stream.begins_record()


def encode_prompts(mode: Mode, prompts: Prompts, stream: Stream | None) -> Encoded:
    """The ids of each row: its stream and what was appended since, or everything anew where there is no going on."""
    if stream is None:
        ids = mode.encode(prompts.rows)
        return Encoded(ids, [len(row) for row in ids], None, {})
    if stream.complete:
        return Encoded(stream.ids, [0] * len(stream.ids), stream, {})
    prompt_ids: list[Tensor] = list(stream.ids)
    rewritten: dict[int, RewriteError] = {}
    if grown := [row for row, ids in enumerate(stream.ids) if len(ids)]:
        rows = [prompts.rows[row] for row in grown]
        for row, added in zip(grown, mode.extend(stream.select(grown), rows), strict=True):
            if isinstance(added, RewriteError):
                rewritten[row] = added
            else:
                prompt_ids[row] = torch.cat([stream.ids[row], added])
    if anew := [row for row, ids in enumerate(stream.ids) if not len(ids) or row in rewritten]:
        for row, ids in zip(anew, mode.encode([prompts.rows[row] for row in anew]), strict=True):
            prompt_ids[row] = ids
            before = stream.ids[row]
            if len(before) and torch.equal(ids[: len(before)], before):
                del rewritten[row]  # the template rewrites, but nothing that this row has: it goes on after all
        stream = stream.begun_anew({row for row in anew if not len(stream.ids[row]) or row in rewritten})
    num_new = [len(ids) - len(before) for ids, before in zip(prompt_ids, stream.ids, strict=True)]
    return Encoded(prompt_ids, num_new, stream, rewritten)


def count_rewritten(
    rewritten: Mapping[int, RewriteError], counters: dict[str, int], *, who: str, allowed: bool
) -> None:
    """Counts the rows that the template made start a new record, and says so the first time.

    Raises  RewriteError unless it is ``allowed``
    """
    row, reason = next(iter(rewritten.items()))
    if not allowed:
        raise RewriteError(
            f"{who}: with prefer_tokens='always' a prompt must begin with the turns before it: row {row} does not "
            f"({reason}) With prefer_tokens=True, in a recipe env.on_rewrite=new_record, such a turn starts a training "
            "record of its own."
        ) from reason
    if not counters["rewritten"]:
        _log.warning(
            f"{who}: the template writes earlier turns differently once a conversation goes on, so that it cannot be "
            "trained in one piece: a turn that does not begin with what came before is rendered anew and starts a "
            f"training record of its own. They are counted in counters['rewritten'], and this is said once. ({reason})"
        )
    counters["rewritten"] += len(rewritten)


def _has_answer(td: TensorDictBase, view_key: str) -> bool:
    """Whether the mode's own view is one that the policy wrote, an answered prompt, and not one of an environment."""
    view = td.get(view_key, None)
    return view is not None and "full" in entries(view).keys()
