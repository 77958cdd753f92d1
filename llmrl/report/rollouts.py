"""The rollouts that a run's report shows: a bounded sample of whole groups from some of its steps.

The texts are those of a model and go into a page: `rollouts.js` sets them as text alone, never as HTML.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from llmrl.errors import DataError
from llmrl.run.rollout_log import Rollout, TokenRecord, read_rollouts, read_tokens, rollout_files

__all__ = ["rollouts_data"]

_MAX_STEPS = 24
_MAX_CHARS, _MAX_TOKENS, _MAX_CALLS = 4000, 1200, 50  # of one conversation
_NUMBERS = {  # name in the page: in the log
    "engine": "engine_logp",
    "trainer": "trainer_logp",
    "advantage": "advantage",
    "ratio": "ratio",
    "entropy": "entropy",
}
Group = dict[int, Rollout]  # by their place in the file of their step


def rollouts_data(run_dir: Path, *, max_bytes: int) -> dict[str, Any] | None:
    """The rollouts of a run for the viewer: at most about ``max_bytes`` of JSON; None for a run without rollouts.

    Steps are the first, the last and others evenly between. Of each come groups in turn: the first by the id of its
    prompt, that of the best answer, that of the worst, then the others by that id. It is as good as random, and the
    first of them have tokens.

    Returns  "steps" that are shown, "num_steps" and "num_rollouts" there are in all of them; "rollouts", a dict each;
             "vocabulary", the text of each token by its id; "control", the ids of special tokens
    """
    files = rollout_files(run_dir)
    if not files:
        return None
    steps = _spread(list(files), _MAX_STEPS)
    groups = {step: _groups(run_dir, step) for step in steps}
    data: dict[str, Any] = {"steps": [], "num_steps": len(files), "rollouts": [], "vocabulary": {}, "control": []}
    data["num_rollouts"] = sum(len(group) for found in groups.values() for group in found)
    room = max_bytes - 200
    ends_first = sorted(groups, key=lambda step: (step not in (steps[0], steps[-1]), step))
    for group in _in_turn([groups[step] for step in ends_first]):
        if room < max_bytes // 50:
            break
        rows = [_row(rollout, min(_MAX_CHARS, max_bytes // 64)) for rollout in group.values()]
        words, control = _add_tokens(rows, run_dir, list(group), min(_MAX_TOKENS, max_bytes // 2000))
        new = {number: text for number, text in words.items() if number not in data["vocabulary"]}
        size = _size(rows) + _size(new) + 8 * len(control)
        if size <= room:
            room -= size
            data["rollouts"] += rows
            data["vocabulary"] |= new
            data["control"] = sorted({*data["control"], *control})
    data["rollouts"].sort(key=lambda row: (row["step"], row["group"]))
    data["steps"] = sorted({row["step"] for row in data["rollouts"]})
    return data


def _groups(run_dir: Path, step: int) -> list[Group]:
    """The groups of a step in the order in which they are shown; none of a file that cannot be read."""
    try:
        rollouts = read_rollouts(run_dir, step, tokens=False)
    except DataError:  # being written, or removed by a run that is resumed
        return []
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


def _in_turn(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The first of each list, then the second of each."""
    return (item for turn in zip_longest(*lists) for item in turn if item is not None)


def _row(rollout: Rollout, max_chars: int) -> dict[str, Any]:
    calls = [
        {
            "turn": call.turn,
            "name": call.name,
            "arguments": _cut(call.arguments, max_chars),
            "result": _cut(call.result, max_chars),
            "outcome": call.outcome,
            "seconds": _rounded(call.seconds),
        }
        for call in rollout.tool_calls[:_MAX_CALLS]
    ]
    return {
        "step": rollout.step,
        "group": rollout.group,
        "prompt_id": rollout.prompt_id,
        "prompt": _cut(rollout.prompt, max_chars),
        "completion": _cut(rollout.completion, max_chars),
        "reward": _rounded(rollout.reward),
        "rewards": {name: _rounded(value) for name, value in rollout.rewards.items()},
        "advantage": _rounded(rollout.advantage),
        "stop_reason": rollout.stop_reason,
        "version": rollout.version,
        "tokens": rollout.tokens,
        "tool_calls": calls,
    }


def _add_tokens(
    rows: Sequence[dict[str, Any]], run_dir: Path, places: Sequence[int], max_tokens: int
) -> tuple[dict[int, str], set[int]]:
    """Adds "record" to the rows of conversations with tokens; returns the texts of their ids, and the special ones.

    ``places`` are those of the rows among the conversations of their step.
    """
    words: dict[int, str] = {}
    control: set[int] = set()
    try:
        records = read_tokens(run_dir, rows[0]["step"], places)
    except DataError:
        return words, control
    for row, number in zip(rows, places, strict=True):
        if (record := records.get(number)) is not None:
            head, tail = _ends(len(record.ids), max_tokens)
            row["record"] = _record(record, head, tail)
            for place in (*head, *tail):
                words[record.ids[place]] = record.texts[place]
                if record.control[place]:
                    control.add(record.ids[place])
    return words, control


def _record(record: TokenRecord, head: range, tail: range) -> dict[str, Any]:
    """The tokens at the places ``head`` and ``tail``: what one message has of them is a span [role, turn, count]."""
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
        "left_out": [len(head), len(record.ids) - len(places)],  # after so many tokens, so many
        **numbers,
    }


def _ends(length: int, limit: int) -> tuple[range, range]:
    """The first two thirds and the last third of what may be shown of a row."""
    if length <= limit:
        return range(length), range(0)
    first = limit - limit // 3
    return range(first), range(length - limit // 3, length)


def _cut(text: str, limit: int) -> str | list[Any]:
    """The text; of one that is too long its beginning, the number of characters left out, and its end."""
    head, tail = _ends(len(text), limit)
    return text if not tail else [text[: len(head)], len(text) - limit, text[tail.start :]]


def _rounded(value: float | None) -> float | None:
    return value if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _size(value: Sequence[Any] | Mapping[Any, Any]) -> int:
    """Its characters in the page, where "<" is written as six."""
    text = json.dumps(value)
    return len(text) + 5 * text.count("<")


def _spread(items: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
