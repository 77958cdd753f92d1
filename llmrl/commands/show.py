"""``llmrl show``: steps, samples and changes of a run, read only from its files; it may still be running."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from llmrl.errors import DataError
from llmrl.run.checkpoint import CheckpointStore
from llmrl.run.console import (
    DPO_COLUMNS,
    GRPO_COLUMNS,
    REWARD_COLUMNS,
    SFT_COLUMNS,
    Sample,
    format_duration,
    format_number,
    make_console,
    print_conversations,
    print_plan,
    print_summary,
    print_table,
)
from llmrl.run.console.numbers import counted
from llmrl.run.masking import masked_info
from llmrl.run.metrics import METRICS, evenly, read_metrics
from llmrl.run.rollout_log import Rollout, read_rollouts
from llmrl.run.run_dir import RunDir

Row = dict[str, float | None]
_CALLS = 20  # of an agent, that are shown of a rollout
_FILES = ("report.html", "config.yaml", "metrics.jsonl", "rollouts", "checkpoints")

_COLUMNS = {  # metric -> the columns of a run that has it
    "reward/mean": GRPO_COLUMNS,
    "preference/chosen_logp": DPO_COLUMNS,
    "preference/chosen_reward": REWARD_COLUMNS,
}


def show(run: RunDir, *, rows: int, step: int | None, samples: int, as_json: bool) -> int:
    """Prints a table of steps (``rows`` of them, evenly spaced; 0 for all), samples, and the change of each measure;
    or all steps and the changes as one JSON object. Returns 0.

    Samples of an agent's rollouts are followed by its calls. For a run with tools, also prints the number of calls and
    their outcomes in the first and last step with calls.

    Raises  DataError if the run has no metrics, or no rollouts of the ``step`` asked for
    """
    info, steps = masked_info(run.read_info()), read_metrics(run.path)
    checkpoints = CheckpointStore(run.path, writer=False).steps()
    if as_json:
        measures = {name: {"before": before, "after": after} for name, before, after in changes(steps)}
        facts = {"changes": measures, "calls": _calls(steps), "checkpoints": checkpoints}
        print(json.dumps({"run": str(run.path), "info": info, "steps": steps, **facts}))
        return 0
    console = make_console()
    command = info.get("command", "?")
    head = [("command", f"llmrl {command} {shlex.join(map(str, info.get('arguments', [])))}")]
    head.append(("created", f"{info.get('created', '?')} by llmrl {info.get('llmrl', '?')}"))
    print_plan(console, f"{command} · {run.path.name}", head)
    if not steps:
        print_summary(console, ["no step is finished yet"])
        return 0
    # The evaluation before the first step has its own row, without training metrics.
    trained = [row for row in steps if any(not name.startswith("eval/") for name in row if name != "step")]
    columns = next((found for name, found in _COLUMNS.items() if any(name in row for row in steps)), SFT_COLUMNS)
    print_table(console, columns, evenly(trained, rows if rows > 0 else len(trained)))
    if samples and (chosen := _extremes(_rollouts(run, step), samples)):
        print_conversations(console, [_sample(rollout) for rollout in chosen])
    seconds = [row["time/step"] for row in steps if row.get("time/step") is not None]
    print_summary(
        console,
        [f"{int(steps[-1]['step'])} steps", format_duration(sum(seconds) if seconds else math.nan)],
        changes=changes(steps),
        facts=[("tools", _calls_in_words(calls))] if (calls := _calls(steps)) else [],
        files=f"{run.path}/{{{', '.join(name for name in _FILES if (run.path / name).exists())}}}",
        following=[f"llmrl eval {run.path}", f"llmrl resume {run.path}"] if checkpoints else [],
    )
    return 0


def changes(steps: Sequence[Row]) -> list[tuple[str, float, float]]:
    """The first and last value of the reward (else the loss), and of every evaluation."""
    names = {name for row in steps for name in row if name.startswith("eval/")}
    evaluations = sorted(
        (name for name in names if not name.endswith(("/std", "/count", "/failed"))), key=lambda name: name.split("/")
    )
    changes = []
    for name in ["reward/mean" if any("reward/mean" in row for row in steps) else "policy/loss", *evaluations]:
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            changes.append((name.removesuffix("/mean"), values[0], values[-1]))
    return changes


def _calls(steps: Sequence[Row]) -> dict[str, Any] | None:
    """The number of calls, and the share of each outcome in the first and the last step with calls."""
    called = [row for row in steps if row.get("tools/calls_mean")]
    if not called:
        return None
    outcomes = {}
    for name in METRICS:
        outcome = name.removeprefix("tools/").removesuffix("_frac")
        if name == f"tools/{outcome}_frac" and outcome != "cut" and any(row.get(name) for row in called):
            outcomes[outcome] = {"before": called[0].get(name), "after": called[-1].get(name)}
    count = sum(round(row["tools/calls_mean"] * row["tools/conversations"]) for row in called)
    return {"count": count, "outcomes": outcomes}


def _calls_in_words(calls: dict[str, Any]) -> str:
    shares = [
        f"{outcome} {format_number(share['before'], 'percent')} -> {format_number(share['after'], 'percent')}"
        for outcome, share in calls["outcomes"].items()
    ]
    return " · ".join([f"{calls['count']:,} calls".replace(",", " "), *shares])


def _rollouts(run: RunDir, step: int | None) -> list[Rollout]:
    try:
        return read_rollouts(run.path, step)
    except DataError:
        if step is not None:
            raise
        return []  # supervised runs have none


def _extremes(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Rollouts with the highest and lowest rewards, alternating; failed ones (no reward) count as lowest."""
    ordered = sorted(rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward)
    chosen: list[Rollout] = []
    while ordered and len(chosen) < count:
        chosen.append(ordered.pop(-1 if len(chosen) % 2 == 0 else 0))
    return chosen


def _sample(rollout: Rollout) -> Sample:
    label = f"step {rollout.step}, {rollout.tokens} tokens, {rollout.stop_reason}"
    if rollout.reward is None:
        label += ", reward failed"
    label += "".join(f", {name} {value!s:.40}" for name, value in rollout.columns.items())
    pieces = [(rollout.prompt, False), (rollout.completion, True)]
    return Sample(pieces, rollout.reward, rollout.advantage, label, _model_calls(rollout))


def _model_calls(rollout: Rollout) -> list[str]:
    """The calls of an agent, a line each: what it continues, its tokens, the row that trains them."""
    calls = rollout.model_calls
    if not calls:
        return []
    rows = {call.row for call in calls} - {-1}
    head = " · ".join(
        filter(None, [f"{counted(len(calls), 'call')} in {counted(len(rows), 'row')}", rollout.untrained])
    )
    if len(rows) > 1:
        head += f" · above is row {max(rows) + 1}"
    lines = []
    for place, call in enumerate(calls):
        texts = (" ".join(text.split()) for text in (call.question, call.answer))
        lines.append(f"{call.in_words(place)} · " + " -> ".join(f"{text:.40}" for text in texts))
    if len(lines) > _CALLS:
        lines[_CALLS // 2 : -_CALLS // 2] = [f"[... {len(lines) - _CALLS} calls ...]"]
    return [head, *lines]
