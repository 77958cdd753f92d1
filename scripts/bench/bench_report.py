"""Measures time and size of a run's report: for 1,000 steps, and for 28 steps of 512 rollouts, as in sums_grpo.

    python scripts/bench/bench_report.py [--repeats 3] [--json FILE]

Each page is written by a separate process, as during a run; the figure is its least processor time, including imports.
The runs are artificial, with a value for every metric.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from table import Row, benchmark

from llmrl.run.metrics import METRICS
from llmrl.run.rollout_log import Rollout, RolloutLog, TokenRecord
from llmrl.run.run_dir import RunDir

TARGET_S, TARGET_MB = 3.0, 5.0
WRITE = "import sys, time; from llmrl.report import write_report; write_report(sys.argv[1]); print(time.process_time())"


def make_run(path: Path, steps: int, rollouts: int) -> Path:
    """Creates a run of ``steps`` with ``rollouts`` in each, 16 of which have token records."""
    draw = random.Random(0)
    path.mkdir()
    run, log = RunDir(path), RolloutLog(path)
    run.write_config(f"steps: {steps}\n")
    run.write_info({"command": "grpo", "recipe": "sums_grpo", "created": "2026-11-23T00:00:00+0000", "llmrl": "0.1.0"})
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **{name: draw.random() for name in METRICS}}) + "\n")
            log.write(step, [_rollout(draw, number) for number in range(rollouts)])
    return path


def _rollout(draw: random.Random, number: int) -> Rollout:
    count, record = 25, None
    if number < 16:
        ids = [draw.randrange(200) for _ in range(count)]
        values = [draw.random() for _ in ids]
        flags = [True] * count
        names = ["assistant"] * count, [0] * count
        record = TokenRecord(ids, [f"t{i}" for i in ids], *names, flags, flags, values, values, values, values, values)
    text = "7+8=15, 3+5+1=9\n<answer>95</answer>"
    facts = {"group": number // 8, "prompt_id": str(draw.random()), "rewards": {"sums": 1.0}, "token_record": record}
    return Rollout("What is 37 + 58?", text, draw.random(), draw.random(), "eos", version=0, tokens=count, **facts)


def written(run: Path, repeats: int) -> tuple[float, float]:
    """Processor time in seconds, and size in megabytes, of writing the report."""
    times = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", WRITE, str(run)], check=True, capture_output=True, text=True)
        times.append(float(done.stdout))
    return min(times), (run / "report.html").stat().st_size / 1e6


def main(repeats: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for steps, rollouts in ((1000, 16), (28, 512)):
            seconds, size = written(make_run(Path(folder) / str(steps), steps, rollouts), repeats)
            name = f"report, {steps:,} steps of {rollouts} rollouts"
            rows += [Row(f"{name}: processor time", seconds, TARGET_S, "s"), Row(name, size, TARGET_MB, "MB")]
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=3)
