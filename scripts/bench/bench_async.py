"""Time of a step with rollouts ahead of the trainer, against rollout and update in turn, on a simulated clock.

    python scripts/bench/bench_async.py [--steps 24] [--update 300] [--half 64]

The queue, the collector and the wrapper are the real ones; the engine and the trainer are two devices in virtual time
(tests/support/simulated.py): answers of lognormal length (median 60 tokens, sigma 0.9, at most 400), 8 groups of 8 per
step; a token of n rows takes 1 + n / half units of time, an update 300 and new weights 10. Nothing is timed, so the
figures are the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from table import Row, benchmark

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.simulated import simulate

TARGET = 1 / 1.8


def main(steps: int, update: float, half: float) -> list[Row]:
    machine = {"steps": steps, "update": update, "half": half}
    turns = simulate(max_staleness=0, **machine).time
    rows = []
    for staleness, oversample in ((1, 0.0), (2, 0.0), (4, 0.0), (4, 0.25)):
        run = simulate(max_staleness=staleness, oversample=oversample, **machine)
        name = f"max_staleness {staleness}" + (f", oversample {oversample:g}" if oversample else "")
        target = TARGET if (staleness, oversample) == (4, 0.0) else None
        rows.append(Row(f"{name}: time of a step / rollout and update in turn", run.time / turns, target))
        dropped = run.totals["dropped_old"] + run.totals["dropped_stragglers"]
        rows.append(Row("the same: share of the groups that are dropped", dropped / run.totals["produced"], unit=""))
    return rows


if __name__ == "__main__":
    benchmark(
        main, __doc__, steps=24, update=(300.0, "units of time"), half=(64.0, "rows that halve the engine's speed")
    )
