"""The token streams of conversations: all ids so far, the mask of sampled ids, and their log-probs.

A stream is read from the prompt entries of a batch, or from its finished turns. It grows by the ids of new messages,
its rows are emptied when they start over, and it is written beside the next prompts. Ids are never re-tokenised from
text. All values are ragged rows: B rows, S ids of a stream, P of a prompt, R of a response, T = P + R.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from llmrl.data.ragged.tensordicts import inner
from llmrl.errors import ShapeError
from llmrl.modules.llm.engines.base import Generation
from llmrl.modules.llm.policies.containers import CONTAINERS
from llmrl.modules.llm.policies.rows import field_rows, is_ragged, unpadded_rows

# attribute of a stream -> its container, its field beside a prompt, its field in a finished turn
_FIELDS = {
    "ids": ("tokens", "prompt", "full"),
    "covered": ("tokens", "covered", "covered"),
    "assistant_mask": ("masks", "prompt_assistant_mask", "all_assistant_mask"),
    "log_probs": ("log_probs", "prompt", "full"),
    "plain": ("log_probs", "plain", "plain"),
    "versions": ("log_probs", "versions", "versions"),
    "routes": ("log_probs", "routes", "routes"),
}
_PER_SAMPLED_ID = ("assistant_mask", "log_probs", "plain", "versions")
_PADDING_MASKS = ("prompt_attention_mask", "all_attention_mask")
_DEFAULT_KEYS = {name: name for name in ("tokens", "masks", "log_probs")}


@dataclass
class TokenStream:
    """One stream per row; a row without ids begins a new one.

    ids             int64[S]
    covered         how many messages or characters of the mode's view the ids cover; None if the ids are the view
    assistant_mask  bool[S]     True for ids that the policy sampled
    log_probs       float32[S]  of sampled ids, 0 elsewhere
    plain           float32[S]  log-probs before truncation of the distribution; None if no turn was truncated
    versions        int64[S]    weight version that sampled each id, 0 elsewhere; None if each turn has one version
    routes          int16[N, layers, K]  experts of the first N <= S ids; None if the engine does not report them
    answered        True if the ids are a prompt that was answered before and is sampled again
    """

    ids: list[Tensor]
    covered: list[int] | None = None
    assistant_mask: list[Tensor] | None = None
    log_probs: list[Tensor] | None = None
    plain: list[Tensor] | None = None
    versions: list[Tensor] | None = None
    routes: list[Tensor] | None = None
    answered: bool = False

    @classmethod
    def read(
        cls, td: TensorDictBase, *, finished: bool = False, keys: Mapping[str, str] = _DEFAULT_KEYS
    ) -> TokenStream | None:
        """Reads the streams beside the prompts of a batch, or with ``finished`` those of its finished turns.

        Padding is left out. Returns None if the batch has no ids. ``keys``: the names of the containers.
        """
        views = {name: td.get(keys[name], None) for name in _DEFAULT_KEYS}
        holders = {name: None if is_non_tensor(view) else inner(view) for name, view in views.items()}
        tokens, masks = holders["tokens"], holders["masks"]
        if tokens is None or _FIELDS["ids"][1 + finished] not in tokens.keys():
            return None
        attention = None
        padded = not is_ragged(tokens) or getattr(views["tokens"], "padded", False)
        if masks is not None and padded:
            attention = field_rows(masks, _PADDING_MASKS[finished])
        columns: dict[str, Any] = {}
        for name, (container, *fields) in _FIELDS.items():
            holder = holders[container]
            if holder is not None and fields[finished] in holder.keys():
                columns[name] = unpadded_rows(holder, fields[finished], attention)
        if "covered" in columns:
            columns["covered"] = [int(value) for value in columns["covered"]]
        return cls(**columns)

    def write(self, td: TensorDictBase, *, only: Collection[str] | None = None) -> None:
        """Writes the streams beside the prompts of ``td``, replacing existing containers.

        ``only`` limits which containers are written.
        """
        columns: dict[str, dict[str, Any]] = {}
        for name, (container, field, _) in _FIELDS.items():
            values = getattr(self, name)
            if values is not None and (only is None or container in only):
                columns.setdefault(container, {})[field] = torch.tensor(values) if name == "covered" else values
        for container, fields in columns.items():
            td.set(container, CONTAINERS[container].from_rows(fields, td.batch_size))

    def extend(self, added: Mapping[int, Tensor], covered: list[int] | None = None) -> Self:
        """Appends ids that were not sampled to some rows: False in the mask, 0 in the log-probs."""
        ids = [torch.cat([row, added[n].to(row.device)]) if n in added else row for n, row in enumerate(self.ids)]
        lengths = [len(row) for row in ids]
        columns = {name: _zeros_behind(self, name, lengths) for name in _PER_SAMPLED_ID}
        return replace(
            self, ids=ids, covered=self.covered if covered is None or self.covered is None else covered, **columns
        )

    def cut(self, rows: Collection[int], *, keep_ids: bool = False) -> Self:
        """Empties these rows, so that each starts a new training record.

        keep_ids  keeps their ids (and ``covered``), but nothing else
        """

        def emptied(name: str) -> Any:
            values = getattr(self, name)
            if values is None or (keep_ids and name in ("ids", "covered")):
                return values
            nothing = values[0][:0] if values and isinstance(values[0], Tensor) else 0
            return [nothing if row in rows else value for row, value in enumerate(values)]

        return replace(self, **{name: emptied(name) for name in _FIELDS})

    def select(self, rows: Sequence[int]) -> Self:
        """The streams at these indices, which may repeat."""
        columns = {name: getattr(self, name) for name in _FIELDS}
        return replace(self, **{n: None if c is None else [c[row] for row in rows] for n, c in columns.items()})

    def begins_record(self) -> list[bool]:
        """Per row, True if the next turn is the first of a training record."""
        if self.answered:  # then the ids are the whole prompt, even for a first turn
            return [not bool(mask.any()) for mask in self.assistant_mask]
        return [not ids.numel() for ids in self.ids]

    def num_answers(self, row: int) -> int | None:
        """The number of answers in the stream of a row; None if unknown."""
        if self.assistant_mask is None:
            return None
        # Each answer is a run of True in the mask, so it begins at a 1 after a 0.
        return max(1, (b"\0" + self.assistant_mask[row].bool().cpu().numpy().tobytes()).count(b"\0\1"))


def turn_columns(
    prompts: list[Tensor],
    turn: Generation,
    stream: TokenStream | None,
    covered: list[int] | None,
    *,
    log_probs: bool,
) -> dict[str, dict[str, Any]]:
    """The columns of finished turns, per container: ids of prompt, response and both, with their masks and log-probs.

    prompts    int64[P]
    stream     the beginning of the prompts; ids that no turn sampled get False in the mask and a log-prob of 0
    log_probs  False leaves out the container of that name
    Raises  ShapeError if the stream is longer than the prompt that it begins
    """
    responses = turn.ids
    prompt_lengths = [prompt.numel() for prompt in prompts]  # a quarter of the cost of len()
    lengths = [at + response.numel() for at, response in zip(prompt_lengths, responses, strict=True)]
    masks: dict[str, Any] = {
        "all_attention_mask": _split(torch.ones(sum(lengths), dtype=torch.bool), lengths),
        "all_assistant_mask": _response_masks(prompt_lengths, lengths),
    }
    tokens: dict[str, Any] = {"prompt": prompts, "response": responses, "full": _joined(prompts, responses)}
    if covered is not None:
        tokens["covered"] = torch.tensor(covered)
    if stream is not None and stream.assistant_mask is not None:
        _check_aligned(stream.assistant_mask, prompt_lengths, "assistant_mask")
        for mask, sampled in zip(masks["all_assistant_mask"], stream.assistant_mask, strict=True):
            mask[: len(sampled)] = sampled
        pairs = zip(masks["all_assistant_mask"], prompt_lengths, strict=True)
        masks["prompt_assistant_mask"] = [mask[:at] for mask, at in pairs]
    columns = {"masks": masks, "tokens": tokens}
    if log_probs:
        before = _zeros_behind(stream, "log_probs", prompt_lengths)
        if before is None:
            before = _split(torch.zeros(sum(prompt_lengths)), prompt_lengths)
        drawn, plain, routes = turn.log_probs, turn.plain_log_probs, turn.routes
        columns["log_probs"] = {"prompt": before, "response": drawn, "full": _joined(before, drawn)}
        earlier = _zeros_behind(stream, "plain", prompt_lengths)
        if plain is not None or earlier is not None:  # without truncation both log-probs are equal
            columns["log_probs"]["plain"] = _joined(earlier or before, plain or drawn)
        if turn.versions is not None:
            earlier = _zeros_behind(stream, "versions", prompt_lengths)
            columns["log_probs"]["versions"] = _joined(earlier or [row.long() for row in before], turn.versions)
        if routes is not None:
            earlier = [row[:0] for row in routes] if stream is None or stream.routes is None else stream.routes
            columns["log_probs"]["routes"] = [_first_known(*pair) for pair in zip(earlier, routes, strict=True)]
    return columns


def _first_known(earlier: Tensor, routes: Tensor) -> Tensor:
    """Keeps for each token the routes of the turn that read it first: they computed its successor's log-prob."""
    unknown = (earlier < 0).flatten(1).all(1)
    return torch.cat([torch.where(unknown[:, None, None], routes[: len(earlier)], earlier), routes[len(earlier) :]])


def _response_masks(prompt_lengths: list[int], lengths: list[int]) -> list[Tensor]:
    """bool[T] per row, True on the response."""
    if not lengths:
        return []
    # One call for all rows: the mask of each row is a run of False, then a run of True.
    ends = torch.tensor([prompt_lengths, lengths]).T
    runs = ends.diff(dim=1, prepend=ends.new_zeros(len(lengths), 1)).flatten()
    return _split(torch.tensor([False, True]).repeat(len(lengths)).repeat_interleave(runs), lengths)


def _split(flat: Tensor, lengths: list[int]) -> list[Tensor]:
    """Splits into copied rows: a view would keep its whole buffer alive, and pickle all of it."""
    return list(torch.split_with_sizes_copy(flat, lengths)) if lengths else []


def _joined(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(first, second, strict=True)]


def _zeros_behind(stream: TokenStream | None, name: str, lengths: list[int]) -> list[Tensor] | None:
    """The stream's rows of that name, padded on the right with False or 0 to these lengths."""
    if (rows := getattr(stream, name, None)) is None:
        return None
    _check_aligned(rows, lengths, name)
    pairs = zip(rows, lengths, strict=True)
    return [row if len(row) == n else torch.nn.functional.pad(row, (0, n - len(row))) for row, n in pairs]


def _check_aligned(rows: list[Tensor], lengths: list[int], name: str) -> None:
    container, field, _ = _FIELDS[name]
    for row, (values, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(values) > length:
            raise ShapeError(
                f"LLM wrapper: ({container!r}, {field!r}) must not be longer than the prompt it describes: got "
                f"{len(values)} values for {length} prompt tokens in row {row}."
            )
