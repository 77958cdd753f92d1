"""Reads a run's folder for a report; the folder may be incomplete, or of an older version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError
from llmrl.run.masking import masked, masked_info
from llmrl.run.metrics import read_metrics
from llmrl.run.run_dir import RunDir

Row = dict[str, float | None]


@dataclass(frozen=True)
class RunFiles:
    """The content of one run's folder.

    ``name``      name of the folder
    ``info``      run.json, {} if it cannot be read
    ``settings``  config.yaml, dotted name -> value on one line; what looks like a password is replaced
    ``steps``     metrics.jsonl in the order of the steps, finite numbers or None; [] before the first one
    ``notes``     what could not be read
    """

    name: str
    info: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """The values of a metric in the steps that have it."""
        return [row[metric] for row in self.steps if row.get(metric) is not None]

    @property
    def trained(self) -> list[Row]:
        """The steps without those that have only an evaluation, such as the one before the first step."""
        return [row for row in self.steps if any(not name.startswith("eval/") for name in row if name != "step")]


def read_run(path: Path | str) -> RunFiles:
    """Reads a run's folder; ``notes`` reports a run.json or config.yaml that cannot be read.

    Raises  DataError if metrics.jsonl is damaged before its last line
    """
    run, notes = RunDir(Path(path)), []
    info, settings = {}, {}
    try:
        info = masked_info(run.read_info())
    except ConfigError as error:
        notes.append(str(error).splitlines()[0])
    try:
        settings = flat_settings(run.read_config().data)
    except ConfigError as error:
        notes.append(str(error).splitlines()[0])
    rows = read_metrics(run.path) if run.metrics.is_file() else []
    steps = sorted(rows, key=lambda row: row["step"])
    return RunFiles(run.path.resolve().name, info, settings, steps, notes)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Each setting on one line, by its dotted name; what looks like a password is replaced."""
    return _flat(masked(settings), "")


def _flat(settings: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = one_line(value)
    return found


def one_line(value: Any) -> str:
    """A setting's value as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
