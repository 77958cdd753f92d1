"""Times a training step that recomputes activations, and one that a checkpoint follows, against one without.

    python scripts/bench/bench_checkpointing.py [--steps 24] [--rounds 3]

Real runs of `llmrl sft sums_sft`, in turn. The first steps of a run are left out as warm-up. A checkpoint follows every
fourth step and a thread flushes it to disk, so the mean over all steps includes its full cost.
"""

from __future__ import annotations

import statistics

from runs import run_steps
from table import Row, benchmark

SETTINGS = ("eval.rows=1", "samples=0", "stop=null")
WAYS = {
    "neither": (),
    "activations recomputed": ("memory.checkpointing=on",),
    "checkpoints written": ("checkpoint.every=4",),
}
WARM_UP = 4


def main(steps: int, rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, own in WAYS.items():
            taken = run_steps("sft", "sums_sft", *SETTINGS, *own, f"steps={steps}")[WARM_UP:]
            seconds[way].append(statistics.mean(metrics["time/step"] for metrics in taken))
    for way, means in seconds.items():
        print(f"{way:22}  {', '.join(f'{mean:.3f}' for mean in means)} s a step")
    least = {way: min(means) for way, means in seconds.items()}
    without = least.pop("neither")
    return [Row(f"a step, {way} / neither", mean / without, 1.4) for way, mean in least.items()]


if __name__ == "__main__":
    benchmark(main, __doc__.splitlines()[0], steps=(24, "of each run"), rounds=(3, "runs of each kind"))
