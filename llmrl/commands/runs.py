"""``llmrl runs``: the runs in a folder, one line each, read only from their files; they may still be running."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from llmrl.errors import ConfigError, DataError
from llmrl.run.console import format_number, make_console, note
from llmrl.run.console.lines import print_block
from llmrl.run.console.numbers import counted
from llmrl.run.metrics import read_metrics
from llmrl.run.run_dir import RunDir

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def list_runs(root: Path, *, as_json: bool = False, every: bool = False) -> int:
    """Prints the runs below ``root``, most recently changed first, and returns 0. Those that ended before their first
    step are only counted, unless ``every``.
    """
    rows = describe_runs(root)
    if as_json:
        print(json.dumps(rows))
        return 0
    console = make_console()
    if not rows:
        note(console, f"there are no runs in {root}/; start one: llmrl sft sums_sft")
        return 0
    shown = [row for row in rows if every or row["step"] or row["state"] in ("running", "damaged")]
    table = Table("run", "recipe", "state", "step", "best", "age", box=None, pad_edge=False)
    for row in shown:
        best = "-" if row["best"] is None else f"{row['metric']} {format_number(row['best'])}"
        steps = str(row["step"]) if row["steps"] is None else f"{row['step']}/{row['steps']}"
        cells = (row["name"], row["recipe"], row["state"], steps, best, _age(row["age_s"]))
        table.add_row(*map(Text, cells))
    if shown:
        print_block(console, table)
    if hidden := len(rows) - len(shown):
        note(console, f"{counted(hidden, 'run')} that never began: llmrl runs --all")
    return 0


def describe_runs(root: Path) -> list[dict[str, Any]]:
    """One row per run: name, recipe, state, last step, total steps, best measure, seconds since its last write.

    States  running, done, interrupted (by Ctrl-C, with its last step saved), stopped (killed, or by an error), damaged
            (its files cannot be read)
    """
    rows = [_describe(RunDir(config.parent)) for config in root.glob("*/config.yaml")]
    return sorted(rows, key=lambda row: row["age_s"])


def _describe(run: RunDir) -> dict[str, Any]:
    newest = max(path.stat().st_mtime for path in (run.config, run.metrics) if path.exists())
    row = {"name": run.path.name, "recipe": "?", "state": "damaged", "step": 0, "steps": None}
    row |= {"metric": None, "best": None, "age_s": max(0.0, time.time() - newest)}
    try:
        info, settings = run.read_info(), run.read_config().data
        metrics = read_metrics(run.path) if run.metrics.exists() else []
    except (ConfigError, DataError):
        return row
    row |= {"recipe": str(info.get("recipe", "?")), "steps": settings.get("steps")}
    row["state"] = "running" if run.holder else str(info.get("ended", "stopped"))
    row["step"] = int(metrics[-1]["step"]) if metrics else 0
    row["metric"], row["best"] = _best(metrics)
    return row


def _best(metrics: Sequence[dict[str, float | None]]) -> tuple[str | None, float | None]:
    """The name and best value of the evaluation, else of the reward, else of the loss, held-out before trained."""
    names = {name for row in metrics for name in row if name.startswith("eval/") and name.endswith("/mean")}
    first = sorted(names, key=lambda name: name.split("/"))[:1]  # sums before sums-validation
    others = (("reward/mean", max), ("eval/loss", min), ("policy/loss", min))
    for name, better in (*((name, max) for name in first), *others):
        values = [row[name] for row in metrics if row.get(name) is not None]
        if values:
            return name.removeprefix("eval/").removesuffix("/mean"), better(values)
    return None, None


def _age(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{seconds // size:.0f}{unit}"
