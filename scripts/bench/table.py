"""The rows that every benchmark here hands to ``run``: what was compared, the figure, and its upper bound."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Row", "add_json_option", "print_table", "read_rows", "write_rows"]


@dataclass(frozen=True)
class Row:
    """One line of the table. ``target`` None: shown for comparison, nothing depends on it."""

    what: str
    measured: float
    target: float | None = None
    unit: str = "x"

    @property
    def ok(self) -> bool:
        return self.target is None or self.measured <= self.target


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the rows of the summary table to FILE")


def write_rows(rows: Sequence[Row], path: str | None) -> None:
    """Writes ``rows`` as JSON; nothing without a path."""
    if path is not None:
        Path(path).write_text(json.dumps([asdict(row) for row in rows]))


def read_rows(path: str | Path) -> list[Row]:
    return [Row(**row) for row in json.loads(Path(path).read_text())]


def print_table(rows: Sequence[Row]) -> None:
    """what | measured | target | ok"""
    width = max((len(row.what) for row in rows), default=0)
    print(f"{'what':{width}}  {'measured':>10}  {'target':>10}  ok")
    for row in rows:
        target = "-" if row.target is None else f"<= {_figure(row.target, row.unit)}"
        verdict = "" if row.target is None else "yes" if row.ok else "NO"
        print(f"{row.what:{width}}  {_figure(row.measured, row.unit):>10}  {target:>10}  {verdict}")


def _figure(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:.3g} {unit}".strip()
