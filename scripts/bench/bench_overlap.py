"""Times a training step whose rollouts vLLM samples during the previous update, against rollout and update in turn.

    python scripts/bench/bench_overlap.py [--steps 12] [--rounds 3] [--grpo SETTING ...]

Real runs of `llmrl grpo sums_grpo` on one untrained model, in turn. All groups are trained, whatever their rewards, so
that each step of each run samples and trains the same number of conversations. The first steps of a run are left out as
warm-up, and so is the last, during which nothing is sampled. Without vllm the script prints a note and has no rows.
"""

from __future__ import annotations

import statistics

from runs import run_steps
from table import Row, benchmark, has_vllm

SETTINGS = (
    "model={architecture: qwen2, hidden_size: 160, layers: 4, heads: 5}",
    "rollout.engine=vllm",
    "zero_variance=keep",
    "eval.rows=1",
    "checkpoint.every=0",
    "samples=0",
)
WAYS = {"in turn": (), "overlapped": ("rollout.max_staleness=1",)}
WARM_UP = 2


def main(steps: int, rounds: int, grpo: list[str]) -> list[Row]:
    if not has_vllm():
        return []
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, own in WAYS.items():
            found[way] += run_steps("grpo", "sums_grpo", *SETTINGS, *own, f"steps={steps}", *grpo)[WARM_UP:-1]
    for way in WAYS:
        names = ("time/step", "time/update", "time/sync")
        print(f"{way:10}  " + "  ".join(f"{name} {_median(found[way], name):.2f}" for name in names))
    overlapped = found["overlapped"]
    ratio = _median(overlapped, "time/step") / _median(found["in turn"], "time/step")
    return [
        Row("vLLM sampling during the update: time of a step / rollout and update in turn", ratio, 1.0),
        Row("the same: share of a step that the trainer waits", _median(overlapped, "async/trainer_idle"), unit=""),
        Row("the same: share of a step that the engine waits", _median(overlapped, "async/engine_idle"), unit=""),
    ]


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        steps=(12, "of each run"),
        rounds=(3, "runs of each kind"),
        grpo={"nargs": "+", "default": [], "metavar": "SETTING", "help": "settings of all runs"},
    )
