"""The token record of one turn: what the turn's prompt ids are made of, and what the finished turn is written as.

Pure functions on lists of rows. B rows, P prompt length, R response length, T = P + R, S length of the stream before
this turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmrl.errors import ShapeError

__all__ = ["Stream", "TurnRecord", "record_turn"]


@dataclass
class Stream:
    """What earlier turns left on the prompt side, per row; a row of zero ids starts afresh.

    ids             int64[S]
    assistant_mask  bool[S]     tokens that the policy sampled
    log_probs       float32[S]  0 where it did not
    covered         how much of the mode's view the ids cover
    plain           float32[S]  as log_probs, before truncation; None where no turn was truncated
    complete        True where the ids are this turn's prompt already, because it was answered before
    """

    ids: list[Tensor]
    assistant_mask: list[Tensor] | None
    log_probs: list[Tensor] | None
    covered: list[int]
    plain: list[Tensor] | None = None
    complete: bool = False

    def select(self, rows: Sequence[int]) -> Stream:
        """The rows at these indices, which may repeat."""

        def pick(values: list | None) -> list | None:
            return None if values is None else [values[row] for row in rows]

        columns = (self.ids, self.assistant_mask, self.log_probs, self.covered, self.plain)
        return Stream(*(pick(column) for column in columns), self.complete)

    def begun_anew(self, rows: Collection[int]) -> Stream:
        """The rows at these indices without a past: a new record starts with them. The others as they are."""

        def cut(values: list[Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [v[:0] if row in rows else v for row, v in enumerate(values)]

        covered = [0 if row in rows else value for row, value in enumerate(self.covered)]
        columns = (cut(self.ids), cut(self.assistant_mask), cut(self.log_probs), covered, cut(self.plain))
        return Stream(*columns, self.complete)

    def begins_record(self) -> list[bool]:
        """Per row, whether this turn is the first that its stream holds."""
        if self.complete:  # the ids are a whole prompt, of a first turn too
            return [not bool(mask.any()) for mask in self.assistant_mask]
        return [not ids.numel() for ids in self.ids]


@dataclass
class TurnRecord:
    """A finished turn, per row: ids, masks and log-probs of prompt, response and both."""

    prompt: list[Tensor]  # int64[P]
    response: list[Tensor]  # int64[R]
    full: list[Tensor]  # int64[T]
    attention_mask: list[Tensor]  # bool[T]
    assistant_mask: list[Tensor]  # bool[T]
    carried_mask: (
        list[Tensor] | None
    )  # bool[P], the part of assistant_mask that earlier turns wrote; None where none did
    prompt_log_probs: list[Tensor] | None  # float32[P]
    response_log_probs: list[Tensor] | None  # float32[R]
    full_log_probs: list[Tensor] | None  # float32[T]
    plain_log_probs: list[Tensor] | None  # float32[T]


def record_turn(
    prompts: list[Tensor],
    responses: list[Tensor],
    log_probs: list[Tensor] | None,
    plain: list[Tensor] | None,
    stream: Stream | None,
) -> TurnRecord:
    """Joins prompts and responses. Ids that were not sampled, in any turn, get mask False and log-prob 0."""
    prompt_lengths = [prompt.numel() for prompt in prompts]  # a quarter of the cost of len()
    response_lengths = [response.numel() for response in responses]
    lengths = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    carried_masks = None if stream is None else stream.assistant_mask
    masks = _rows(prompt_lengths, response_lengths)
    if carried_masks is not None:
        _check_aligned(carried_masks, prompt_lengths, "masks", "prompt_assistant_mask")
        for mask, carried in zip(masks, carried_masks, strict=True):
            mask[: len(carried)] = carried
    full = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    attention = _cut(torch.ones(sum(lengths), dtype=torch.bool), lengths)
    prompt_lp = full_lp = full_plain = None
    if log_probs is not None:
        prompt_lp = _padded_with_zeros(
            None if stream is None else stream.log_probs, prompt_lengths, "log_probs", "prompt"
        )
        full_lp = [torch.cat(pair) for pair in zip(prompt_lp, log_probs, strict=True)]
        carried_plain = None if stream is None else stream.plain
        if plain is not None or carried_plain is not None:
            before = (
                prompt_lp
                if carried_plain is None
                else _padded_with_zeros(carried_plain, prompt_lengths, "log_probs", "plain")
            )
            after = log_probs if plain is None else plain
            full_plain = [torch.cat(pair) for pair in zip(before, after, strict=True)]
    carried = None if carried_masks is None else [m[:at] for m, at in zip(masks, prompt_lengths, strict=True)]
    return TurnRecord(prompts, responses, full, attention, masks, carried, prompt_lp, log_probs, full_lp, full_plain)


def _rows(prompt_lengths: list[int], response_lengths: list[int]) -> list[Tensor]:
    """bool[T] per row, True on the response."""
    if not prompt_lengths:
        return []
    runs = torch.tensor([prompt_lengths, response_lengths]).T.flatten()
    flat = torch.tensor([False, True]).repeat(len(prompt_lengths)).repeat_interleave(runs)
    lengths = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    return _cut(flat, lengths)


def _cut(flat: Tensor, lengths: list[int]) -> list[Tensor]:
    """Rows with memory of their own: a view would be pickled, and kept alive, with its whole buffer."""
    return list(torch.split_with_sizes_copy(flat, lengths)) if lengths else []


def _padded_with_zeros(rows: list[Tensor] | None, lengths: list[int], container: str, field: str) -> list[Tensor]:
    if rows is None:
        return _cut(torch.zeros(sum(lengths)), lengths)
    _check_aligned(rows, lengths, container, field)
    return [torch.nn.functional.pad(row, (0, length - len(row))) for row, length in zip(rows, lengths, strict=True)]


def _check_aligned(rows: list[Tensor], lengths: list[int], container: str, field: str) -> None:
    for row, (values, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(values) > length:
            raise ShapeError(
                f"LLM wrapper: ({container!r}, {field!r}) must not be longer than the prompt it describes: got "
                f"{len(values)} values for {length} prompt tokens in row {row}."
            )
