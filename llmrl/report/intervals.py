"""Evaluations of a run with 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmrl.report.run_files import Row

_Z = 1.959964  # normal quantile for 95%


@dataclass(frozen=True)
class Score:
    """The result of one evaluation; without an interval if the run did not log the number of problems."""

    step: int
    mean: float
    count: int | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


def interval(mean: float, std: float, count: int) -> tuple[float, float] | None:
    """The 95% interval of a mean of ``count`` independent scores: Wilson's if all are 0 or 1, else the normal one.

    ``std`` is that of the population; scores in [0, 1] are all 0 or 1 exactly if its square is mean (1 - mean).

    >>> [round(bound, 4) for bound in interval(0.9, 0.3, 100)]
    [0.8256, 0.9448]
    >>> [round(bound, 4) for bound in interval(2.0, 1.0, 101)]
    [1.804, 2.196]
    """
    if count < 1:
        return None
    if 0 <= mean <= 1 and abs(std**2 - mean * (1 - mean)) < 1e-6:
        # Wilson 1927: the normal interval has length 0 at means of 0 and 1, and is too short near them.
        middle = mean + _Z**2 / (2 * count)
        half = _Z * math.sqrt(mean * (1 - mean) / count + (_Z / (2 * count)) ** 2)
        scale = 1 + _Z**2 / count
        return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
    if count < 2:
        return None
    # count - 1 because std is that of the population.
    half = _Z * std / math.sqrt(count - 1)
    return mean - half, mean + half


def evaluations(steps: Sequence[Row]) -> dict[str, list[Score]]:
    """The scores of each environment, in the order of the steps: "sums" for the metrics ``eval/sums/...``."""
    found: dict[str, list[Score]] = {}
    names = {name for row in steps for name in row if name.startswith("eval/") and name.endswith("/mean")}
    for metric in sorted(names, key=lambda name: name.split("/")):
        stem = metric.removesuffix("mean")
        for row in steps:
            mean, std, count = (row.get(f"{stem}{part}") for part in ("mean", "std", "count"))
            if mean is None:
                continue
            bounds = None if std is None or count is None else interval(mean, std, int(count))
            score = Score(int(row["step"] or 0), mean, None if count is None else int(count), bounds)
            found.setdefault(stem.removeprefix("eval/").rstrip("/"), []).append(score)
    return found
