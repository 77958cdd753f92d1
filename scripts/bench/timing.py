"""Timing for the benchmarks: functions in turn, the fastest run of each."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["best"]


def best(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each function: its fastest call. They run in turn, so that a busy moment meets all of them."""
    fastest = [float("inf")] * len(functions)
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            function()
            fastest[number] = min(fastest[number], time.perf_counter() - start)
    return [1e3 * seconds for seconds in fastest]
