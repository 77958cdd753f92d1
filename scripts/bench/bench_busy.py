"""Times a step of `llmrl sft sums_sft` next to busy processes: it should slow down only in proportion to its share.

    python scripts/bench/bench_busy.py [--others 2] [--steps 20]

The command runs with its default threads, alone and next to processes that compute forever; the median step of each
counts. Its fair share of the cores is their number divided by the number of threads and processes that need one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from runs import run_steps
from table import Row, benchmark

from llmrl.commands.cli import WAITING

SPIN = {"OMP_WAIT_POLICY": "ACTIVE"}  # threads that occupy their core while they wait


def step_s(steps: int, others: int, **waiting: str) -> float:
    """Seconds of the median step, next to ``others`` busy processes."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    settings = (f"steps={steps}", "epochs=1", "stop=null", "eval.rows=10")
    try:
        taken = run_steps("sft", "sums_sft", *settings, environment=environment | waiting)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return statistics.median(metrics["time/step"] for metrics in taken[2:])


def main(others: int, steps: int) -> list[Row]:
    cores = os.cpu_count() or 1
    fair = (cores + others) / cores  # torch has as many threads as there are cores
    alone, beside, spinning = step_s(steps, 0), step_s(steps, others), step_s(steps, others, **SPIN)
    what = f"a step next to {others} busy processes / a step alone, by its share of the cores"
    return [
        Row(what, beside / alone / fair, 1.5),
        Row("the same with threads that spin while they wait", spinning / alone / fair),
        Row("a step alone", alone, None, "s"),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, others=(2, "number of busy processes"), steps=20)
