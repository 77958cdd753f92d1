"""The charts of a report: the metrics of each chart, and the points to draw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llmrl.report.intervals import Score, evaluations
from llmrl.report.run_files import Row, RunFiles
from llmrl.run.metrics import METRICS

MOST_POINTS = 1000  # per line; longer runs keep the extremes
SECTIONS = {  # of the page, with the families of metrics that belong there unless in `CHARTS`
    "Learning": ("reward", "preference", "data", "curriculum"),
    "Answers": ("tokens", "group", "rollout", "agent"),
    "Policy": ("policy", "router"),
    "Engine and trainer": ("mismatch", "async"),
    "Speed": ("perf", "time", "engine"),
    "Tools": ("tools",),
}
PHASES = ("generate", "logp", "update", "sync", "eval")


@dataclass(frozen=True)
class Chart:
    """One chart: metric -> label, in the order in which they are drawn. ``kind`` is the format of its numbers."""

    section: str
    title: str
    lines: Mapping[str, str]
    kind: str = "number"  # percent, count, seconds
    note: str = ""


CHARTS = (
    Chart("Learning", "Reward", {"reward/mean": "mean"}, note="Of the step's completions."),
    Chart("Learning", "Spread of rewards", {"reward/std": "standard deviation", "reward/p50": "median"}),
    Chart("Learning", "Pairs ranked right", {"preference/right_frac": "share of pairs"}, "percent"),
    Chart(
        "Learning",
        "Preference rewards",
        {
            "preference/chosen_reward": "chosen",
            "preference/rejected_reward": "rejected",
            "preference/margin": "margin",
        },
    ),
    Chart(
        "Learning",
        "Log-probs of the pairs",
        {"preference/chosen_logp": "chosen", "preference/rejected_logp": "rejected"},
        note="Chosen ones that fall with the rejected ones are a known fault of DPO.",
    ),
    Chart("Learning", "Loss", {"policy/loss": "loss"}),
    Chart("Learning", "Held-out loss", {"eval/loss": "loss"}),
    Chart("Learning", "Held-out perplexity", {"eval/perplexity": "perplexity"}),
    Chart("Learning", "Held-out margin", {"eval/margin": "margin"}),
    Chart("Learning", "Trained tokens", {"tokens/trained": "in this step"}, "count"),
    Chart("Answers", "Length", {"tokens/completion_mean": "mean", "tokens/completion_max": "longest"}, "count"),
    Chart("Answers", "Truncated answers", {"tokens/truncated_frac": "share at the token limit"}, "percent"),
    Chart(
        "Answers",
        "Groups",
        {"group/kept_frac": "trained", "group/zero_var_frac": "all rewards equal"},
        "percent",
        "A group whose rewards are all equal teaches nothing.",
    ),
    Chart("Answers", "Failed rollouts", {"rollout/failed": "in this step"}, "count"),
    Chart("Answers", "Turns", {"rollout/turns_mean": "per conversation"}),
    Chart("Policy", "Entropy", {"policy/entropy": "nats per token"}),
    Chart("Policy", "KL", {"policy/kl_ref": "from the reference", "mismatch/kl": "engine and trainer"}),
    Chart("Policy", "Clipped tokens", {"policy/clip_low_frac": "below", "policy/clip_high_frac": "above"}, "percent"),
    Chart("Policy", "Ratio", {"policy/ratio_mean": "new over old probability"}),
    Chart("Policy", "Gradient norm", {"policy/grad_norm": "before clipping"}),
    Chart("Policy", "Learning rate", {"policy/lr": "learning rate"}),
    Chart(
        "Engine and trainer",
        "Difference of log-probs",
        {"mismatch/logp_abs_mean": "mean", "mismatch/logp_abs_max": "largest", "mismatch/probe": "probe"},
        note="Between engine and trainer, for the same weights.",
    ),
    Chart("Engine and trainer", "Importance weights", {"mismatch/is_mean": "mean", "mismatch/is_max": "largest"}),
    Chart(
        "Engine and trainer",
        "Effective share of tokens",
        {"mismatch/ess": "effective", "mismatch/masked_frac": "left out"},
        "percent",
    ),
    Chart(
        "Engine and trainer",
        "Staleness",
        {"async/staleness_mean": "mean", "async/staleness_max": "largest"},
        note="Optimizer steps between the weights that sampled and those that are trained.",
    ),
    Chart("Engine and trainer", "Idle", {"async/engine_idle": "engine", "async/trainer_idle": "trainer"}, "percent"),
    Chart("Speed", "Tokens per second", {"perf/gen_tok_s": "sampled", "perf/train_tok_s": "trained"}, "count"),
    Chart(
        "Speed",
        "Cache of the engine",
        {"engine/cache_max_frac": "in use, at most", "engine/prefix_hit_frac": "prompt tokens found in it"},
        "percent",
    ),
    Chart("Speed", "Speculative decoding", {"engine/draft_accepted_frac": "drafted tokens accepted"}, "percent"),
    Chart(
        "Speed",
        "Room in the engine",
        {"engine/preempted": "preempted requests", "engine/waiting_max": "waiting, at most"},
        "count",
        "Preempted requests are computed again: give the KV cache more memory.",
    ),
    Chart("Speed", "Weights to the engine", {"perf/sync_gb_s": "GB per second"}),
    Chart("Speed", "Peak memory", {"perf/peak_gb": "GB"}, note="Of the fullest device; on a CPU, of the process."),
    Chart("Speed", "Slowest rank", {"perf/imbalance": "cost of its rows over the mean of all"}),
    Chart(
        "Speed", "Use of the hardware", {"perf/mfu": "of peak arithmetic", "perf/padding_frac": "padding"}, "percent"
    ),
)
# Drawn as part of another chart, or a multiple of a value that is drawn.
_NOT_DRAWN = re.compile(
    r"step|time/\w+|reward/(p10|p90)|eval/.*/(mean|std|count|failed)|data/epoch|perf/train_tok_s_device"
)
_ALWAYS_DRAWN = ("Reward", "Loss", "Held-out loss", "Time per step")
# One chart for each measure, with a line for each source of a mix or pool of a curriculum.
_BY_NAME = re.compile(r"(source|curriculum)/([\w./-]+)/(\w+)")
_LEVEL = re.compile(r"curriculum/(.+/)?level")
_REWARD_FUNCTION = re.compile(r"reward/([\w.-]+)/mean")


def charts(run: RunFiles) -> list[dict[str, Any]]:
    """The charts of everything that the run measured, as the page reads them.

    Returns  for each chart its texts, "lines" {"label", "metric", "x", "y"}, and optionally "band" {"label", "x",
             "low", "high"}, "whiskers" (the same, for an evaluation), "stacked", "events" {"x", "label"}
    """
    rows, names = run.trained, {name for row in run.trained for name in row}
    meanings = {**METRICS, **(run.info.get("metrics") or {})}
    # Lines are of all steps: the evaluation before the first one has a row of its own.
    made = [
        _with_lines(chart, {label: _line(run.steps, name) for name, label in chart.lines.items()}) for chart in CHARTS
    ]
    for chart in made:
        if chart["title"] == "Reward":
            chart["band"] = _reward_band(rows, names)
        if chart["title"] == "Loss" and "reward/mean" in names:
            chart["note"] = "In GRPO near 0 by construction: look at the reward."
    functions = sorted(match[1] for name in names if (match := _REWARD_FUNCTION.fullmatch(name)))
    lines = {name: _line(rows, f"reward/{name}/mean") for name in functions}
    if len(functions) != 1 or lines[functions[0]]["y"] != _line(rows, "reward/mean")["y"]:  # else a second reward chart
        made[1:1] = [_with_lines(Chart("Learning", "Reward functions", {}, note="Mean of each function."), lines)]
    made[1:1] = [_evaluation(name, {"mean": scores}) for name, scores in evaluations(run.steps).items()]
    made.append(_time_of_phases(rows))
    placed = {name for chart in CHARTS for name in chart.lines} | {f"reward/{name}/mean" for name in functions}
    titles = run.info.get("charts") or {}  # of metrics that an algorithm declares
    together: dict[str, list[str]] = {}
    for name in sorted(name for name in names - placed if not _NOT_DRAWN.fullmatch(name)):
        own = _BY_NAME.fullmatch(name)
        by = "pool" if own and own[1] == "curriculum" and own[3] != "level" else "source"
        title = f"{_title(f'{own[1]}/{own[3]}')} by {by}" if own else titles.get(name, name)
        together.setdefault(title, []).append(name)
    for title, group in together.items():
        first, note = group[0], " ".join(f"{meanings[name]}." for name in group if len(group) > 1 and name in meanings)
        section = _section(first.partition("/")[0])
        title = _title(first) if title == first else title
        chart = Chart(section, title, {}, _kind(first), note or meanings.get(first, ""))
        labels = {name: own[2] if (own := _BY_NAME.fullmatch(name)) else name.partition("/")[2] for name in group}
        made.append(_with_lines(chart, {label or name: _line(rows, name) for name, label in labels.items()}))
    if events := _level_changes(rows, names):
        for chart in made:
            if chart["section"] == "Learning":
                chart["events"] = events
    return _in_sections(made)


def split_constant(made: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, float, str]]]:
    """The charts whose values change, and (name, value, kind) of the lines of the others."""
    constant = [
        chart
        for chart in made
        if chart["title"] not in _ALWAYS_DRAWN
        and "whiskers" not in chart
        and all(len(line["y"]) > 1 and len(set(line["y"])) == 1 for line in chart["lines"])
    ]
    values = []
    for chart in constant:
        for line in chart["lines"]:
            name = f"{chart['title']}, {line['label']}" if len(chart["lines"]) > 1 else chart["title"]
            values.append((name, line["y"][0], chart["kind"]))
    return [chart for chart in made if chart not in constant], values


def overlaid_charts(runs: Mapping[str, RunFiles]) -> list[dict[str, Any]]:
    """A chart for each metric and each evaluation, with a line for each run."""
    names = {name for run in runs.values() for row in run.trained for name in row}
    titles = {name: chart for chart in CHARTS for name in chart.lines}
    made = []
    for name in [*titles, *sorted(names - set(titles))]:
        if name == "step" or (name.startswith("eval/") and name not in titles):  # drawn as evaluations
            continue
        section = _section(name.partition("/")[0])
        chart = titles.get(name, Chart(section, _title(name), {}, _kind(name), METRICS.get(name, "")))
        several = len(chart.lines) > 1
        title = f"{chart.title}: {chart.lines[name]}" if several else chart.title
        lines = {label: _line(run.steps, name) for label, run in runs.items()}
        made.append(_with_lines(Chart(chart.section, title, {}, chart.kind, METRICS.get(name, chart.note)), lines))
    scores: dict[str, dict[str, list[Score]]] = {}
    for label, run in runs.items():
        for env, found in evaluations(run.steps).items():
            scores.setdefault(env, {})[label] = found
    made[:0] = [_evaluation(env, found) for env, found in scores.items()]
    places = {label: place for place, label in enumerate(runs)}
    for line in (line for chart in made for line in chart["lines"]):
        line["colour"] = places[line["label"]]  # a run keeps its colour in charts without the other runs
    return _in_sections(made)


def thin(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """The indices of the values to draw: all, or beyond ``most`` both ends and the extremes of equal stretches.

    >>> thin([5, 1, 9, 4, 0, 0, 7, 2], most=4)
    [0, 1, 2, 4, 6, 7]
    """
    if len(values) <= most:
        return list(range(len(values)))
    count = max(1, most // 2)
    kept = {0, len(values) - 1}  # besides the extremes
    for part in range(count):
        stretch = range(part * len(values) // count, (part + 1) * len(values) // count)
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


def _line(rows: Sequence[Row], name: str) -> dict[str, Any]:
    points = [(int(row["step"] or 0), row[name]) for row in rows if row.get(name) is not None]
    kept = thin([value for _, value in points])
    return {"metric": name, "x": [points[i][0] for i in kept], "y": [_short(points[i][1]) for i in kept]}


def _level_changes(rows: Sequence[Row], names: set[str]) -> list[dict[str, Any]]:
    """The steps after which a curriculum drew prompts of another level."""
    events = []
    for name in sorted(name for name in names if _LEVEL.fullmatch(name)):
        levels = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        source = name.split("/")[1:-1]
        events += [
            {"x": int(step), "label": " ".join([*source, f"level {level:g}"])}
            for (_, before), (step, level) in pairwise([(0, 0), *levels])
            if level != before
        ]
    return events


def _with_lines(chart: Chart, lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    drawn = [{"label": label, **line} for label, line in lines.items() if line["x"]]
    return {"section": chart.section, "title": chart.title, "kind": chart.kind, "note": chart.note, "lines": drawn}


def _reward_band(rows: Sequence[Row], names: set[str]) -> dict[str, Any] | None:
    """Quantiles, or if the run did not log them, the standard deviation around the mean.

    None if all rewards are 0 or 1: the mean then describes them completely, and quantiles jump between 0 and 1.
    """
    spread = [(row["step"], row.get("reward/mean"), row.get("reward/std")) for row in rows]
    spread = [(step, mean, std) for step, mean, std in spread if mean is not None and std is not None]
    # In [0, 1], only scores that are all 0 or 1 have the variance mean (1 - mean).
    if all(abs(std**2 - mean * (1 - mean)) < 1e-6 for _, mean, std in spread):
        return None
    if {"reward/p10", "reward/p90"} <= names:
        label = "10th to 90th percentile"
        ends = [(row["step"], row.get("reward/p10"), row.get("reward/p90")) for row in rows]
        ends = [end for end in ends if None not in end]
    else:
        label = "mean ± standard deviation"
        ends = [(step, mean - std, mean + std) for step, mean, std in spread]
    # The extremes of both edges, so each may have half of the points.
    kept = sorted({i for edge in (1, 2) for i in thin([end[edge] for end in ends], MOST_POINTS // 2)})
    return {"label": label, **_columns([ends[i] for i in kept])}


def _columns(ends: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    steps, low, high = zip(*ends, strict=True) if ends else ((), (), ())
    return {"x": list(steps), "low": [_short(value) for value in low], "high": [_short(value) for value in high]}


def _evaluation(name: str, scores: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """A chart of means, with a whisker for each that has an interval."""
    lines, whiskers = {}, []
    for label, found in scores.items():
        mean = {"x": [score.step for score in found], "y": [_short(score.mean) for score in found]}
        lines[label] = {"metric": f"eval/{name}/mean", **mean}
        whiskers.append(_columns([(score.step, *score.interval) for score in found if score.interval]))
    counts = {score.count for found in scores.values() for score in found} - {None}
    note = f"95% interval, {' or '.join(f'{count:,}' for count in sorted(counts))} problems." if counts else ""
    return _with_lines(Chart("Learning", f"Evaluation: {name}", {}, note=note), lines) | {"whiskers": whiskers}


def _time_of_phases(rows: Sequence[Row]) -> dict[str, Any]:
    """A stacked chart of the seconds of each phase; the remaining time of a step is the "rest"."""
    # One choice of steps for all phases: stacked areas need the same steps.
    steps = [row for row in rows if row.get("time/step") is not None]
    kept = [steps[i] for i in thin([row["time/step"] for row in steps])]
    parts = {phase: [row.get(f"time/{phase}") or 0.0 for row in kept] for phase in PHASES}
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["rest"] = [max(0.0, row["time/step"] - total) for row, total in zip(kept, sums, strict=True)]
    x = [int(row["step"] or 0) for row in kept]
    lines = {
        phase: {"metric": f"time/{phase}", "x": x, "y": [_short(value) for value in values]}
        for phase, values in parts.items()
        if any(values)
    }
    return _with_lines(Chart("Speed", "Time per step", {}, "seconds"), lines) | {"stacked": True}


def _in_sections(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts without empty ones, ordered by `SECTIONS`."""
    drawn = [chart for chart in made if chart["lines"]]
    order = [*SECTIONS, "Other"]
    return sorted(drawn, key=lambda chart: order.index(chart["section"]))


def _section(family: str) -> str:
    return next((section for section, families in SECTIONS.items() if family in families), "Other")


def _title(name: str) -> str:
    """A metric's name in words.

    >>> _title("tools/timeout_frac"), _title("reward/right/mean"), _title("reward/p10")
    ('Tools: share of timeout', 'Reward of right', 'Reward: p10')
    """
    if match := _REWARD_FUNCTION.fullmatch(name):
        return f"Reward of {match[1]}"
    family, _, rest = name.partition("/")
    words = rest.replace("_", " ")
    words = f"share of {words.removesuffix(' frac')}" if words.endswith(" frac") else words
    return f"{family.capitalize()}: {words}" if words else family


def _kind(name: str) -> str:
    if name.endswith(("_frac", "_rate", "_idle")):
        return "percent"
    return "seconds" if name.startswith("time/") else "number"


def _short(value: float) -> float:
    return float(f"{value:.6g}")
