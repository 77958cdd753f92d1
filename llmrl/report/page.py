"""``report.html``: a self-contained page that needs no network and runs only its own scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from llmrl.report.curves import charts, split_constant
from llmrl.report.intervals import evaluations
from llmrl.report.rollouts import rollouts_data
from llmrl.report.run_files import RunFiles, one_line, read_run
from llmrl.report.warnings import findings
from llmrl.run.console import format_duration, format_number
from llmrl.run.files import replace_file
from llmrl.run.metrics import METRICS
from llmrl.run.yaml_source import YamlLoader

HEADLINES = {
    "reward/mean": "reward",
    "preference/right_frac": "pairs ranked right",
    "eval/loss": "held-out loss",
    "policy/loss": "loss",
}


def write_report(run_dir: Path | str) -> Path:
    """Writes ``report.html`` into a run's folder, atomically; the run may still be in progress.

    Raises  DataError if the run's files are damaged, RunFolderError if the page cannot be written
    """
    path = Path(run_dir) / "report.html"
    replace_file(path, page(report_data(read_run(run_dir)), rollouts_data(Path(run_dir))))
    return path


def report_data(run: RunFiles) -> dict[str, Any]:
    """The data of a run's page: cards, findings, charts and tables, as the script reads them."""
    info = run.info
    command = " ".join(str(info[name]) for name in ("command", "recipe") if info.get(name))
    created = str(info.get("created", ""))[:16].replace("T", " ")
    rows = [[str(cell) for cell in row] for row in info.get("plan", ())]
    plan = {"title": "Machine and plan", "columns": ["", "as it ran"], "rows": rows, "open": True}
    drawn, constant = split_constant(charts(run))
    started = f"started {created} with llmrl {info.get('llmrl', '?')}" if created else ""
    return {
        "title": run.name,
        "subtitle": " · ".join(filter(None, [command and f"llmrl {command}", started])),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cards": _cards(run),
        "findings": [{"text": finding.text, "remedy": finding.remedy} for finding in findings(run)],
        "charts": drawn,
        "constant": [{"label": label, "value": value, "kind": kind} for label, value, kind in constant],
        "first_tables": [],
        "tables": [plan, _settings_table(run), _metrics_table(run)],
        "notes": run.notes + ([] if run.steps else ["No step is finished yet."]),
    }


def page(data: Mapping[str, Any], rollouts: Mapping[str, Any] | None = None, *, live: bool = False) -> str:
    """The whole page, ASCII except for its own assets. If ``live``, it polls its server for newer ``data``.

    Text of a run is only in JSON blocks, with every "<" escaped, and the scripts display it as text. The content
    security policy allows only the page's own scripts, by their hashes.
    """
    scripts = [_asset(name) for name in ("rollouts.js", "curves.js")]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    parts = {
        "policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        + ("connect-src 'self'; " if live else "")
        + f"script-src {sources}",
        "style": _asset("report.css") + _asset("rollouts.css"),
        "live": "yes" if live else "no",
        "data": as_json(data),
        "rollouts": as_json(rollouts),
        "rollouts_script": scripts[0],
        "script": scripts[1],
    }
    # One pass, so that braces in the text of a run are not replaced as well.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def page_number(value: float | None) -> str:
    """A number as the page's script writes it.

    >>> [page_number(value) for value in (0.97, 0.88281, 12345.6, 2e-5, None)]
    ['0.97', '0.883', '12346', '2e-05', '-']
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def as_json(data: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("llmrl.report") / "assets" / name).read_text(encoding="utf-8")


# --- parts -----------------------------------------------------------------------------------------------------------


def _cards(run: RunFiles) -> list[dict[str, str]]:
    """The headline numbers: each measure before and after, then steps, time and tokens."""
    cards = []
    for name, scores in evaluations(run.steps).items():
        first, last = scores[0], scores[-1]
        note = f"step {last.step}"
        if last.count and last.interval:
            low, high = map(page_number, last.interval)
            note = f"95% interval {low} to {high}, {last.count:,} problems"
        before = first.mean if len(scores) > 1 else None
        cards.append(_change(f"evaluation {name}", before, last.mean, note))
    for metric, label in HEADLINES.items():
        values = run.values(metric)
        if values and not (metric == "policy/loss" and run.values("reward/mean")):
            cards.append(_change(label, values[0], values[-1], "from the first step to the last"))
    if run.steps:
        planned = run.settings.get("steps", "null")
        of = f" of {planned}" if planned.isdigit() else ""
        seconds = run.values("time/step")
        took = format_duration(sum(seconds)) if seconds else "-"
        pace = f"{format_number(sum(seconds) / len(seconds), 'seconds')} s per step" if seconds else ""
        cards.append({"label": "steps", "value": f"{run.steps[-1]['step']:.0f}{of}", "note": f"{took} · {pace}"})
    if trained := sum(run.values("tokens/trained")):
        speed = run.values("perf/train_tok_s")
        note = f"{format_number(sum(speed) / len(speed), 'count')} per second during updates" if speed else ""
        cards.append({"label": "trained tokens", "value": format_number(trained, "count"), "note": note})
    return cards


def _change(label: str, before: float | None, after: float, note: str) -> dict[str, str]:
    if before is None:  # measured once
        return {"label": label, "value": page_number(after), "note": note}
    sign = "+" if after >= before else "−"  # noqa: RUF001  a minus
    gain = f"{sign}{page_number(abs(after - before))}"
    value = f"{page_number(before)} → {page_number(after)}"
    return {"label": label, "value": value, "note": " · ".join(filter(None, [gain, note]))}


def _settings_table(run: RunFiles) -> dict[str, Any]:
    """The settings that were given and are not the default; older runs did not record the defaults."""
    rows, defaults = [], run.info.get("defaults", {})
    for name, place in run.info.get("origins", {}).items():
        under = [key for key in run.settings if key == name or key.startswith(f"{name}.")]
        text = str(defaults.get(name, ""))
        default = one_line(yaml.load(text, YamlLoader)) if text not in ("", "required") else ""
        rows += [[key, run.settings[key], default, str(place)] for key in under if run.settings[key] != default]
    title = "Settings that differ from their defaults"
    return {"title": title, "columns": ["setting", "value", "default", "given in"], "rows": rows, "open": True}


def _metrics_table(run: RunFiles) -> dict[str, Any]:
    rows = []
    for name in sorted({name for row in run.steps for name in row} - {"step"}):
        values = run.values(name)
        if values:
            numbers = [page_number(number) for number in (values[0], values[-1], min(values), max(values))]
            rows.append([name, *numbers, METRICS.get(name, "")])
    columns = ["metric", "first", "last", "least", "most", "meaning"]
    return {"title": "All metrics", "columns": columns, "rows": rows, "open": False}
