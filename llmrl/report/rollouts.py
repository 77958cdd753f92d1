"""The rollouts that a run's report shows: a bounded sample of whole groups from some of its steps.

The texts come from a model and go into a page: `rollouts.js` inserts them as text, never as HTML.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from llmrl.errors import DataError
from llmrl.run.metrics import evenly
from llmrl.run.rollout_log import (
    ModelCallRecord,
    Rollout,
    TokenRecord,
    ToolCallRecord,
    read_rollouts,
    read_tokens,
    rollout_files,
)

_MAX_BYTES = 3_000_000  # with the curves of 1,000 steps the page stays under 5 MB
_MAX_STEPS = 24
_MAX_CHARS, _MAX_TOKENS, _MAX_CALLS = 4000, 1200, 50  # per conversation
_NUMBERS = {  # name in the page: name in the log
    "engine": "engine_logp",
    "trainer": "trainer_logp",
    "advantage": "advantage",
    "ratio": "ratio",
    "entropy": "entropy",
}
Group = dict[int, Rollout]  # by their position in the file of the step


def rollouts_data(run_dir: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any] | None:
    """The rollouts of a run for the viewer: at most about ``max_bytes`` of JSON; None for a run without rollouts.

    Takes the first step, the last one and others evenly spaced between them. Each step adds its groups in turn: the
    group with the first prompt id, that with the best answer, that with the worst, then the others by prompt id, which
    is practically random. In the result, groups with tokens come first in their step.

    Returns  "steps" that are shown, "num_steps" of the run, "num_rollouts" of the steps read, "unreadable" steps;
             "rollouts", a dict each; "vocabulary", the text of each token by its id; "control", the ids of special ones
    """
    files = rollout_files(run_dir)
    if not files:
        return None
    steps = evenly(list(files), _MAX_STEPS)
    read = {step: _groups(run_dir, step) for step in steps}
    groups = {step: found for step, found in read.items() if found is not None}
    data: dict[str, Any] = {"steps": [], "num_steps": len(files), "rollouts": [], "vocabulary": {}, "control": []}
    data["num_rollouts"] = sum(len(group) for found in groups.values() for group in found)
    data["unreadable"] = sorted(set(read) - set(groups))
    max_tokens = min(_MAX_TOKENS, max_bytes // 2000)
    records_of = cache(lambda step: _records(run_dir, step))
    room = max_bytes - 200
    ends_first = sorted(groups, key=lambda step: (step not in (steps[0], steps[-1]), step))
    # In rounds, so that the steps share the space; each round begins with the first and the last step.
    in_turn = zip_longest(*(groups[step] for step in ends_first))  # the first of each step, then the second of each
    for group in (group for turn in in_turn for group in turn if group is not None):
        if room < max_bytes // 50:
            break
        rows = [_row(rollout, min(_MAX_CHARS, max_bytes // 64)) for rollout in group.values()]
        records = records_of(rows[0]["step"])
        words, control = _add_tokens(rows, [records.get(place) for place in group], max_tokens)
        new = {number: text for number, text in words.items() if number not in data["vocabulary"]}
        # A group that does not fit is left out; a smaller one after it may still fit.
        size = _size(rows) + _size(new) + 8 * len(control)
        if size <= room:
            room -= size
            data["rollouts"] += rows
            data["vocabulary"] |= new
            data["control"] = sorted({*data["control"], *control})
    seen = {(row["step"], row["group"]) for row in data["rollouts"] if "record" in row}
    data["rollouts"].sort(key=lambda row: (row["step"], (row["step"], row["group"]) not in seen, row["group"]))
    data["steps"] = sorted({row["step"] for row in data["rollouts"]})
    return data


def _groups(run_dir: Path, step: int) -> list[Group] | None:
    """The groups of a step in the order in which they are shown; None for a file that cannot be read."""
    try:
        rollouts = read_rollouts(run_dir, step, tokens=False)
    except DataError:  # damaged, or removed by a run that is resumed
        return None
    groups: dict[int, Group] = defaultdict(dict)
    for place, rollout in enumerate(rollouts):
        groups[rollout.group][place] = rollout
    rewards = {
        number: [-math.inf if rollout.reward is None else rollout.reward for rollout in group.values()]
        for number, group in groups.items()
    }
    others = sorted(groups, key=lambda number: next(iter(groups[number].values())).prompt_id)
    extremes = (
        [max(others, key=lambda n: max(rewards[n])), min(others, key=lambda n: min(rewards[n]))] if others else []
    )
    return [groups[number] for number in dict.fromkeys([*others[:1], *extremes, *others])]


def _row(record: Rollout | ToolCallRecord | ModelCallRecord, max_chars: int) -> dict[str, Any]:
    """A rollout without its tokens, or a call, as the page shows it; ``model_calls`` only of those that have some."""

    def shown(name: str, value: Any) -> Any:
        if name == "columns":
            return {
                key: _cut(part if isinstance(part, str) else json.dumps(part), max_chars) for key, part in value.items()
            }
        if isinstance(value, str):
            return _cut(value, max_chars)
        if isinstance(value, dict):
            return {name: _rounded(number) for name, number in value.items()}
        if isinstance(value, Sequence):
            return [_row(call, max_chars) for call in value[:_MAX_CALLS]]
        return _rounded(value) if isinstance(value, float) else value

    values = {part.name: getattr(record, part.name) for part in fields(record) if part.name != "token_record"}
    made = {name: shown(name, value) for name, value in values.items() if name != "model_calls" or value}
    if "model_calls" in made:
        made["num_model_calls"], made["untrained"] = len(record.model_calls), record.untrained
    return made


def _records(run_dir: Path, step: int) -> Mapping[int, TokenRecord]:
    try:
        return read_tokens(run_dir, step)
    except DataError:  # as above
        return {}


def _add_tokens(
    rows: Sequence[dict[str, Any]], records: Sequence[TokenRecord | None], max_tokens: int
) -> tuple[dict[int, str], set[int]]:
    """Adds "record" to the rows of conversations with tokens; returns the texts of their ids, and the special ones."""
    words: dict[int, str] = {}
    control: set[int] = set()
    for row, record in zip(rows, records, strict=True):
        if record is not None:
            head, tail = _ends(len(record.ids), max_tokens)
            row["record"] = _record(record, head, tail)
            for place in (*head, *tail):
                words[record.ids[place]] = record.texts[place]
                if record.control[place]:
                    control.add(record.ids[place])
    return words, control


def _record(record: TokenRecord, head: range, tail: range) -> dict[str, Any]:
    """The tokens at positions ``head`` and ``tail``; those of one message are a span [role, turn, count]."""
    places = [*head, *tail]
    kinds = [(record.roles[place], record.turns[place]) for place in places]
    numbers = {
        name: [_rounded(values[place]) for place in places]
        for name, field in _NUMBERS.items()
        if (values := getattr(record, field)) and any(values[place] is not None for place in places)
    }
    return {
        "ids": [record.ids[place] for place in places],
        "spans": [[*kind, len(list(same))] for kind, same in groupby(kinds)],
        "trained": "".join("01"[record.trained[place]] for place in places),
        "left_out": [len(head), len(record.ids) - len(places)],  # after how many tokens, and how many
        **numbers,
    }


def _ends(length: int, limit: int) -> tuple[range, range]:
    """The positions to show: all, or ``limit`` of them, two thirds at the beginning and a third at the end."""
    if length <= limit:
        return range(length), range(0)
    first = limit - limit // 3
    return range(first), range(length - limit // 3, length)


def _cut(text: str, limit: int) -> str | list[Any]:
    """The text; if it is too long, its beginning, the number of characters left out, and its end."""
    head, tail = _ends(len(text), limit)
    return text if not tail else [text[: len(head)], len(text) - limit, text[tail.start :]]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _size(value: Sequence[Any] | Mapping[Any, Any]) -> int:
    """The number of characters in the page, where "<" is escaped to six."""
    text = json.dumps(value)
    return len(text) + 5 * text.count("<")
