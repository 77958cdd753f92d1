"""``llmrl compare``: several runs side by side, in the terminal and as a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from llmrl.errors import DataError
from llmrl.report.curves import overlaid_charts
from llmrl.report.intervals import evaluations
from llmrl.report.page import HEADLINES, page, page_number
from llmrl.report.run_files import RunFiles, read_run
from llmrl.run.console import format_duration, format_number, make_console
from llmrl.run.files import replace_file
from llmrl.run.metrics import METRICS

Rows = list[list[str]]
_PLACES = ("checkpoint", "log")  # sections of settings that do not affect the training
_SHOWN = (
    "reward/mean",
    "eval/loss",
    "policy/loss",
    "preference/right_frac",
    "tokens/completion_mean",
    "policy/entropy",
)
_SHOWN += ("mismatch/logp_abs_mean", "perf/gen_tok_s", "perf/train_tok_s", "perf/peak_gb", "time/step")


def compare(paths: Sequence[Path], *, html: Path | None = None) -> int:
    """Prints evaluations, metrics and settings that differ; with ``html`` writes a page with overlaid curves too.

    Raises  DataError if a run is damaged, RunFolderError if the page cannot be written
    """
    console = make_console()
    runs = _named([read_run(path) for path in paths])
    for run in runs.values():
        if not run.steps:
            raise DataError(f"{run.name}: must have a finished step to be compared: metrics.jsonl is missing or empty.")
    for title, rows in (("measured", _measured(runs)), ("settings that differ", _differences(runs))):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("", *runs):
            table.add_column(Text(name), overflow="fold")
        for name, *cells in rows:
            table.add_row(Text(name, "cyan"), *(Text(cell) for cell in cells))
        console.print(table if rows else f"{title}: none")
    if html is not None:
        replace_file(html, page(comparison_data(runs)))
        console.print(Text.assemble(("report    ", "cyan"), str(html)), soft_wrap=True)
    return 0


def comparison_data(runs: Mapping[str, RunFiles]) -> dict[str, Any]:
    """The page's data, in the form of `llmrl.report.page.report_data`."""
    columns = ["", *runs]
    return {
        "title": " · ".join(runs),
        "subtitle": f"{len(runs)} runs",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cards": [_card(name, run) for name, run in runs.items()],
        "findings": [],
        "charts": overlaid_charts(runs),
        "constant": [],
        "first_tables": [
            {"title": "Settings that differ", "columns": columns, "rows": _differences(runs), "open": True},
            {"title": "Measured", "columns": columns, "rows": _measured(runs), "open": True},
        ],
        "tables": [],
        "notes": [note for run in runs.values() for note in run.notes],
    }


def _card(name: str, run: RunFiles) -> dict[str, str]:
    """The headline of a run: its last evaluation, else its last reward or loss."""
    found = evaluations(run.steps)
    measured = [(f"evaluation {env}, step {scores[-1].step}", scores[-1].mean) for env, scores in found.items()]
    for metric, label in HEADLINES.items():
        measured += [(f"{label}, last step", values[-1]) for values in [run.values(metric)] if values]
    note, value = measured[0] if measured else ("", None)
    return {"label": name, "value": page_number(value), "note": note}


def _named(runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """The runs by name; a repeated name gets a number."""
    named: dict[str, RunFiles] = {}
    for run in runs:
        name, number = run.name, 2
        while name in named:
            name, number = f"{run.name} ({number})", number + 1
        named[name] = run
    return named


def _measured(runs: Mapping[str, RunFiles]) -> Rows:
    """Evaluations with their intervals, then metrics: the mean of the last tenth of the steps."""
    rows = [["steps", *(f"{run.steps[-1]['step']:.0f}" for run in runs.values())]]
    seconds = [run.values("time/step") for run in runs.values()]
    rows.append(["time", *(format_duration(sum(values)) if values else "-" for values in seconds)])
    scores = [evaluations(run.steps) for run in runs.values()]
    for env in sorted({env for found in scores for env in found}):
        rows.append([f"{env}, first", *(str(found[env][0]) if env in found else "-" for found in scores)])
        rows.append([f"{env}, last", *(str(found[env][-1]) if env in found else "-" for found in scores)])
    functions = {name for run in runs.values() for row in run.steps for name in row} - set(METRICS)
    functions = {name for name in functions if name.startswith("reward/")}
    for name in [*_SHOWN[:1], *sorted(functions), *_SHOWN[1:]]:
        cells = [_end(run.values(name)) for run in runs.values()]
        if any(cell != "-" for cell in cells):
            rows.append([f"{name}, end", *cells])
    return rows


def _end(values: Sequence[float]) -> str:
    last = values[-max(1, len(values) // 10) :]
    return format_number(sum(last) / len(last)) if last else "-"


def _differences(runs: Mapping[str, RunFiles]) -> Rows:
    """The settings that differ between the runs."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run.settings))
    rows = [[name, *(run.settings.get(name, "-") for run in runs.values())] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0].partition(".")[0] not in _PLACES]
