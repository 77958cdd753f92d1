"""The steps of a run: a live panel on a terminal, one stable line per step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmrl.run.console.lines import note, print_labelled, print_line
from llmrl.run.console.numbers import format_duration, format_number


@dataclass(frozen=True)
class Column:
    """One column of the step table: a metric, its heading and its format.

    ``kind``    number (three significant digits), percent (of a fraction), count (18.4k), int, seconds
    ``spread``  a metric shown behind the value, as in ``.214±.360``
    ``about``   what a short label means; the table begins with these
    ``zero``    values nearer to 0 are rounding errors, and shown as 0
    """

    label: str
    metric: str
    kind: str = "number"
    spread: str | None = None
    about: str = ""
    zero: float = 0.0

    @property
    def width(self) -> int:
        return max(len(self.label), {"number": 7, "percent": 5, "count": 6, "int": 6, "seconds": 8}[self.kind]) + (
            8 if self.spread else 0
        )

    def text(self, metrics: Mapping[str, float | None]) -> str:
        """The cell's content, a dash if the step has no such metric."""
        value = metrics.get(self.metric)
        shown = format_number(0.0 if value is not None and abs(value) < self.zero else value, self.kind)
        if self.spread and metrics.get(self.spread) is not None:
            shown += f"±{format_number(metrics[self.spread], self.kind)}"
        return shown


SFT_COLUMNS = (
    Column("loss", "policy/loss"),
    Column("|g|", "policy/grad_norm", about="gradient norm"),
    Column("lr", "policy/lr"),
    Column("trained", "tokens/trained", "count"),
    Column("epoch", "data/epoch"),
    Column("tok/s", "perf/train_tok_s", "count"),
    Column("step s", "time/step", "seconds"),
)

DPO_COLUMNS = (
    Column("loss", "policy/loss"),
    Column("right", "preference/right_frac", "percent", about="pairs whose chosen answer is ahead"),
    Column("margin", "preference/margin"),
    Column("chosen", "preference/chosen_logp"),
    Column("rejected", "preference/rejected_logp"),
    *SFT_COLUMNS[1:],
)

REWARD_COLUMNS = (
    Column("loss", "policy/loss"),
    Column("right", "preference/right_frac", "percent", about="pairs whose chosen answer is ahead"),
    Column("chosen", "preference/chosen_reward"),
    Column("rejected", "preference/rejected_reward"),
    *SFT_COLUMNS[1:],
)

GRPO_COLUMNS = (
    Column("reward", "reward/mean", spread="reward/std"),
    Column("len", "tokens/completion_mean", "int"),
    Column("trunc", "tokens/truncated_frac", "percent", about="answers cut at the token limit"),
    Column("useful", "group/kept_frac", "percent", about="groups that reached the loss"),
    Column("calls", "tools/call_rate", "percent", about="answers that call a tool"),
    Column("kl", "mismatch/kl", about="trainer from engine", zero=1e-7),
    Column("ent", "policy/entropy", about="entropy per token"),
    Column("|g|", "policy/grad_norm", about="gradient norm"),
    Column("stale", "async/staleness_mean", about="versions that the rollouts are behind"),
    Column("gen tok/s", "perf/gen_tok_s", "count"),
    Column("train tok/s", "perf/train_tok_s", "count"),
    Column("step s", "time/step", "seconds"),
)


class _Labelled(Protocol):
    name: str
    label: str
    meaning: str


def grpo_columns(*, tools: bool, own: Iterable[_Labelled] = ()) -> tuple[Column, ...]:
    """The columns of a run that is about to start; those of tools only if it has ``tools``; metrics with a label."""
    shown = [column for column in GRPO_COLUMNS if tools or not column.metric.startswith("tools/")]
    labelled = [Column(metric.label, metric.name, about=metric.meaning) for metric in own if metric.label]
    return (*shown[:-3], *labelled, *shown[-3:])


class StepDisplay:
    """Shows the progress of a training loop; a context manager around it. A quiet console shows nothing.

    On a terminal: a panel with the last rows, a sparkline of the first column, a progress bar and the time left;
    output of `console.warn` or ``print`` appears above it. Elsewhere: a header, then one line per `step`.

    ``total``  steps of the run; ``start`` is the number of those already done (a resumed run)
    """

    def __init__(
        self,
        total: int,
        columns: Sequence[Column],
        *,
        console: Console,
        title: str = "",
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self.columns = tuple(columns)
        self.console = console
        self.title = title
        self._clock = clock
        self._done = start
        self._last = clock()
        self._durations: deque[float] = deque(maxlen=20)
        self._lines: deque[str] = deque(maxlen=8)
        self._course: list[float] = []
        live = not console.quiet and console.is_terminal and console.is_interactive
        self._live = Live(self._panel(), console=console, refresh_per_second=4) if live else None

    def __enter__(self) -> StepDisplay:
        if legend := " · ".join(f"{column.label}: {column.about}" for column in self.columns if column.about):
            print_labelled(self.console, "columns", legend, "cyan")
        if self._live:
            self._live.start()
        else:
            print_line(self.console, Text(_header(self.columns, "eta")))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float], summary: str = "") -> None:
        """Shows one finished step; ``summary`` (of an evaluation, say) ends its line or stays above the panel."""
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        self._done = step
        line = _row(self.columns, step, metrics, format_duration(self.seconds_left))
        value = metrics.get(self.columns[0].metric) if self.columns else None
        if value is not None and math.isfinite(value):
            self._course.append(float(value))
        if self._live:
            self._lines.append(line)
            self._live.update(self._panel())
            if summary:
                note(self.console, f"step {step}: {summary}")
        else:
            print_line(self.console, Text(f"{line}  {summary}".rstrip()))

    @property
    def seconds_left(self) -> float:
        """The remaining steps at the mean pace of the last twenty."""
        if not self._durations:
            return math.nan
        return max(0, self.total - self._done) * sum(self._durations) / len(self._durations)

    def _panel(self) -> Panel:
        head = Text(_header(self.columns, "eta"), "bold", no_wrap=True, overflow="ellipsis")
        body = [Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines]
        bar = Table.grid(padding=(0, 2))
        left = "" if math.isnan(self.seconds_left) else f"{format_duration(self.seconds_left)} left"
        course = _sparkline(self._course)
        bar.add_row(
            ProgressBar(total=max(1, self.total), completed=self._done, width=30),
            f"{self._done}/{self.total}",
            left,
            f"{self.columns[0].label} {course}" if course else "",
        )
        return Panel(Group(head, *body, bar), title=self.title or None, title_align="left", border_style="dim")


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Mapping[str, float | None]]) -> None:
    """Prints recorded steps in the run's columns; a column without values is left out."""
    shown = [column for column in columns if any(row.get(column.metric) is not None for row in rows)]
    print_line(console, Text(_header(shown), "bold"))
    for row in rows:
        print_line(console, Text(_row(shown, int(row["step"] or 0), row)))


def _header(columns: Sequence[Column], *more: str) -> str:
    cells = [f"{'step':>6}", *(f"{column.label:>{column.width}}" for column in columns)]
    return "  ".join([*cells, *(f"{word:>8}" for word in more)])


def _row(columns: Sequence[Column], step: int, metrics: Mapping[str, float | None], *more: str) -> str:
    cells = [f"{step:>6}", *(f"{column.text(metrics):>{column.width}}" for column in columns)]
    return "  ".join([*cells, *(f"{word:>8}" for word in more)])


def _sparkline(values: Sequence[float]) -> str:
    """A sparkline of the values; each block is the mean of a bucket."""
    if len(values) < 2:
        return ""
    size = max(1, math.ceil(len(values) / 24))
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((mean - low) / span * 8))] for mean in means)
