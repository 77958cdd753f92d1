"""Measurements for the benchmarks: the fastest run of functions called in turn; memory; profiles."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path

from table import Row

__all__ = ["best", "compare", "memory_mb", "profiled"]


def best(*functions: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Milliseconds of each function's fastest call. They run in turn, so that a busy moment affects all of them."""
    fastest = [float("inf")] * len(functions)
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = clock()
            function()
            fastest[number] = min(fastest[number], 1e3 * (clock() - start))
    return fastest


def compare(
    name: str,
    floor: Callable[[], object],
    ours: Callable[[], object],
    calls: int,
    target: float | None = None,
    *,
    rounds: int = 300,
) -> Row:
    """Prints the microseconds per call of ``floor`` and of ``ours``, each from the fastest round of ``calls`` calls."""

    def many(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                call()

        return run

    floor_us, ours_us = (ms * 1e3 / calls for ms in best(many(floor), many(ours), repeats=rounds))
    print(f"{name:58}{floor_us:10.1f}{ours_us:10.1f}", flush=True)
    return Row(f"{name}: llmrl / by hand", ours_us / floor_us, target)


def memory_mb(field: str, process: int | str = "self") -> float:
    """VmRSS (resident), VmHWM (its peak) or RssAnon (private, not file-backed) of a process, in MB; needs Linux."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def profiled(function: Callable[[], object], repeats: int, lines: int) -> None:
    """Prints a profile of a function."""
    with cProfile.Profile() as recorded:
        for _ in range(repeats):
            function()
    pstats.Stats(recorded).sort_stats("tottime").print_stats(lines)
