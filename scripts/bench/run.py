"""Runs the benchmarks of this folder (``bench_*.py``), each in a separate process, and prints one table.

    scripts/bench/run [loss rollout ...] [--verbose]

Exits with 1 if a row misses its target or a benchmark fails. README.md explains the rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import Row, print_table, read_rows

FOLDER = Path(__file__).parent
BENCHMARKS = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def run_one(name: str, folder: Path, verbose: bool) -> list[Row] | None:
    """The rows of one benchmark; if it failed, prints its output and returns None."""
    result = folder / f"{name}.json"
    # Comparisons with a floor run on one thread; start-up and busy runs as the user sees them, on all threads.
    environment = os.environ if name in ("startup", "busy") else os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"bench_{name}.py"), "--json", str(result)],
        env=environment,
        stdout=None if verbose else subprocess.PIPE,
        stderr=None if verbose else subprocess.STDOUT,
        text=True,
    )
    failed = done.returncode != 0 or not result.exists()
    print(f"{name:10} {time.perf_counter() - started:5.0f} s{'  FAILED' if failed else ''}", flush=True)
    if not failed:
        return read_rows(result)
    if not verbose:
        print(done.stdout)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(BENCHMARKS)}")
    parser.add_argument("--verbose", action="store_true", help="show what each benchmark prints")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known here: {', '.join(BENCHMARKS)}")
    version, load = sys.version.split()[0], os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start, {platform.machine()}, Python {version}")
    if "grpo_step" in names and importlib.util.find_spec("trl") is None:
        print("trl: not installed; grpo_step compares with the loop by hand only (README.md says how to add it)")
    with tempfile.TemporaryDirectory() as folder:
        results = [run_one(name, Path(folder), arguments.verbose) for name in names]
    rows = [row for result in results for row in result or ()]
    print()
    print_table(rows)
    return int(None in results or not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
