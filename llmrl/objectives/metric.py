"""A number that a loss reports in each step: its name in the log, and how the updates of a step are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """What a field of a loss's output is called in metrics.jsonl, on the page and in the console.

    name     "family/name"; packaged ones are in `llmrl.run.metrics.METRICS`
    meaning  one line; needed for a name that is not in that table
    merge    of a step's updates: "mean" (by trained tokens), "max", or "first" (the value before the weights moved)
    label    heading of its column in the console; none without
    chart    title of the chart that it is drawn in, with others of the same title; without, one of its own
    """

    name: str
    meaning: str = ""
    merge: Literal["mean", "max", "first"] = "mean"
    label: str = ""
    chart: str = ""
