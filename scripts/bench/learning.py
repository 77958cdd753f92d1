"""Checks that a recipe learns, from several seeds: held-out accuracy after SFT and after GRPO, and seconds.

    python scripts/bench/learning.py --seeds 0 1 2
    python scripts/bench/learning.py --recipe tools --seeds 0 1
    python scripts/bench/learning.py --grpo rollout.engine=vllm rollout.max_staleness=4

Each seed is two real runs in a temporary folder, as in `scripts/quickstart`. Exits with 1 if a bound is missed: after
SFT between 0.2 and 0.7, after GRPO at least 0.9, at most 3 minutes for both (6 with tools). With tools, the share of
problems with a tool call is printed next to the accuracy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SFT_BOUNDS, GRPO_BOUND, SECONDS = (0.2, 0.7), 0.9, {"sums": 180.0, "tools": 360.0}
ENVS = {"sums": "sums", "tools": "big_sums"}  # recipe -> the task of its evaluation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", choices=ENVS, default="sums")
    parser.add_argument("--grpo", nargs="+", default=[], metavar="SETTING", help="settings of the GRPO run")
    options = parser.parse_args()
    recipe, env = options.recipe, ENVS[options.recipe]
    print(f"{'seed':>4}  {'sft':>7} {'calls':>6}  {'sft s':>7}  {'grpo':>7} {'calls':>6}  {'grpo s':>7}  ok")
    missed = 0
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs = Path(folder)
            sft_s = _train(runs, "sft", f"{recipe}_sft", f"seed={seed}")
            grpo_s = _train(runs, "grpo", f"{recipe}_grpo", f"seed={seed}", f"model={runs / 'sft'}", *options.grpo)
            (sft, sft_calls), (grpo, grpo_calls) = _last(runs / "sft", env), _last(runs / "grpo", env)
        fine = SFT_BOUNDS[0] <= sft <= SFT_BOUNDS[1] and grpo >= GRPO_BOUND and sft_s + grpo_s <= SECONDS[recipe]
        missed += not fine
        print(
            f"{seed:>4}  {sft:>7.3f} {sft_calls:>6}  {sft_s:>7.0f}  {grpo:>7.3f} {grpo_calls:>6}  {grpo_s:>7.0f}  "
            f"{'yes' if fine else 'NO'}",
            flush=True,
        )
    return int(missed > 0)


def _train(runs: Path, command: str, *settings: str) -> float:
    """Runs one recipe in a folder named after its command; returns the seconds it took."""
    started = time.perf_counter()
    arguments = [sys.executable, "-m", "llmrl.commands.cli", command, *settings, "--runs", str(runs), "--name", command]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _last(run: Path, env: str) -> tuple[float, str]:
    """The last accuracy on held-out problems that a run recorded, and the share of them that called a tool."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = [row for row in map(json.loads, lines) if f"eval/{env}/mean" in row][-1]
    rate = row.get(f"eval/{env}/call_rate")
    return row[f"eval/{env}/mean"], "-" if rate is None else f"{rate:.0%}"


if __name__ == "__main__":
    sys.exit(main())
