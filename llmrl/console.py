"""What a person sees of a run: the plan, the steps, sample conversations, the ending. Nothing here measures or decides.

On a terminal the steps are a live panel; anywhere else, exactly one ASCII line per step with stable columns, which
``grep`` and ``awk`` can read. Every function takes the rich Console that it writes to, so that a test can pass its own.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

__all__ = [
    "GRPO_COLUMNS",
    "SFT_COLUMNS",
    "Column",
    "Sample",
    "StepDisplay",
    "format_duration",
    "make_console",
    "note",
    "print_conversations",
    "print_plan",
    "print_summary",
    "print_table",
    "warn",
]

_LABEL_WIDTH = 10


@dataclass(frozen=True)
class Column:
    """One column of the step table: which metric, under which heading, written how.

    ``kind``    number (three significant digits), percent (of a fraction), count (18.4k), int, seconds
    ``spread``  a metric shown behind the value, as in ``.214+-.360``
    """

    label: str
    metric: str
    kind: str = "number"
    spread: str | None = None

    @property
    def width(self) -> int:
        return max(len(self.label), {"number": 7, "percent": 5, "count": 6, "int": 6, "seconds": 8}[self.kind]) + (
            9 if self.spread else 0
        )

    def text(self, metrics: Mapping[str, float | None]) -> str:
        """The cell's content, a dash where the step has no such metric."""
        shown = _format(metrics.get(self.metric), self.kind)
        if self.spread and metrics.get(self.spread) is not None:
            shown += f"+-{_format(metrics[self.spread], self.kind)}"
        return shown


SFT_COLUMNS = (
    Column("loss", "policy/loss"),
    Column("|g|", "policy/grad_norm"),
    Column("lr", "policy/lr"),
    Column("trained", "tokens/trained", "count"),
    Column("epoch", "data/epoch"),
    Column("tok/s", "perf/train_tok_s", "count"),
    Column("step s", "time/step", "seconds"),
)

GRPO_COLUMNS = (
    Column("reward", "reward/mean", spread="reward/std"),
    Column("len", "tokens/completion_mean", "int"),
    Column("trunc", "tokens/truncated_frac", "percent"),
    Column("useful", "group/kept_frac", "percent"),
    Column("kl", "mismatch/kl"),
    Column("ent", "policy/entropy"),
    Column("|g|", "policy/grad_norm"),
    Column("stale", "async/staleness_mean"),
    Column("gen tok/s", "perf/gen_tok_s", "count"),
    Column("train tok/s", "perf/train_tok_s", "count"),
    Column("step s", "time/step", "seconds"),
)


@dataclass(frozen=True)
class Sample:
    """One conversation to show: pieces of text, each with whether its tokens are trained, and how it was judged."""

    pieces: Sequence[tuple[str, bool]]
    reward: float | None = None
    advantage: float | None = None
    label: str = ""


def make_console(rank: int | None = None) -> Console:
    """The console of this process; it is silent on every rank but the first (``rank`` None: the RANK variable)."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    return Console(quiet=rank != 0, highlight=False)


def print_plan(console: Console, title: str, rows: Sequence[tuple[str, str]], *, right: str = "") -> None:
    """A heading, then aligned rows of label and value; a value's further lines are indented under its first."""
    gap = max(2, min(console.width, 120) - len(title) - len(right))
    _line(console, Text.assemble((title, "bold"), " " * gap if right else "", (right, "dim")))
    width = _width(label for label, _ in rows)
    for label, value in rows:
        _labelled(console, label, value, "cyan", width)


def note(console: Console, text: str) -> None:
    """Something worth knowing; printed above a live panel if there is one on this console."""
    _labelled(console, "note", text, "blue")


def warn(console: Console, text: str) -> None:
    """Something that may be wrong; printed above a live panel if there is one on this console."""
    _labelled(console, "warn", text, "yellow")


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Mapping[str, float | None]]) -> None:
    """Recorded steps, in the columns that the run showed; a column that no step has a value for is left out."""
    shown = [column for column in columns if any(row.get(column.metric) is not None for row in rows)]
    _line(console, Text(_header(shown), "bold"))
    for row in rows:
        _line(console, Text(_row(shown, int(row["step"] or 0), row)))


class StepDisplay:
    """Shows a training loop as it goes; used as a context manager around it.

    On a terminal: a panel with the last rows, the course of the first column, a progress bar and the time left.
    Anywhere else: a header, then one line per `step`. What `warn`, `note` or any ``print`` writes appears above it.

    ``total``    steps of the run; ``start`` is the number of those already done (a resumed run)
    ``enabled``  False shows nothing (every rank but the first)
    """

    def __init__(
        self,
        total: int,
        columns: Sequence[Column],
        *,
        console: Console,
        title: str = "",
        start: int = 0,
        enabled: bool = True,
        rows: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self.columns = tuple(columns)
        self.console = console
        self.title = title
        self.enabled = enabled and not console.quiet
        self._clock = clock
        self._done = start
        self._last = clock()
        self._durations: deque[float] = deque(maxlen=20)
        self._lines: deque[str] = deque(maxlen=rows)
        self._course: list[float] = []
        live = self.enabled and console.is_terminal and console.is_interactive
        self._live = Live(self._panel(), console=console, refresh_per_second=4) if live else None

    def __enter__(self) -> StepDisplay:
        if self._live:
            self._live.start()
        elif self.enabled:
            _line(self.console, Text(_ascii(_header(self.columns, "eta"))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float], remark: str = "") -> None:
        """Shows one finished step; ``remark``, an evaluation for example, ends its line (or stays above the panel)."""
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        self._done = step
        if not self.enabled:
            return
        line = _row(self.columns, step, metrics, format_duration(self.seconds_left))
        value = metrics.get(self.columns[0].metric) if self.columns else None
        if value is not None and math.isfinite(value):
            self._course.append(float(value))
        if self._live:
            self._lines.append(line)
            self._live.update(self._panel())
            if remark:
                self.note(f"step {step}: {remark}")
        else:
            _line(self.console, Text(_ascii(f"{line}  {remark}".rstrip())))

    @property
    def seconds_left(self) -> float:
        """The remaining steps at the mean pace of the last twenty."""
        if not self._durations:
            return math.nan
        return max(0, self.total - self._done) * sum(self._durations) / len(self._durations)

    def warn(self, text: str) -> None:
        """`llmrl.console.warn` on this display's console."""
        if self.enabled:
            warn(self.console, text)

    def note(self, text: str) -> None:
        """`llmrl.console.note` on this display's console."""
        if self.enabled:
            note(self.console, text)

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


def print_conversations(console: Console, samples: Sequence[Sample], *, max_chars: int = 1200) -> None:
    """Sample conversations, the trained part bright on a terminal and in «» elsewhere; the verdict stands at the right.

    Text longer than ``max_chars`` loses its middle. Control characters that a model wrote are shown, not obeyed.
    """
    left, right = ("«", "»") if _can_write(console, "«»") else ("<<", ">>")
    for sample in samples:
        body = Text()
        for piece, trained in _join(_shorten(sample.pieces, max_chars)):
            if console.is_terminal and console.color_system:
                body.append(_printable(piece), "bold green" if trained else "dim")
            else:
                body.append(f"{left}{_printable(piece)}{right}" if trained else _printable(piece))
        verdict = Text("\n".join(filter(None, [sample.label, *_verdict(sample)])), justify="right")
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_row(body, verdict)
        _print_block(console, Group(Rule(style="dim", characters="-"), table))
    if samples:
        _print_block(console, Rule(style="dim", characters="-"))


def print_summary(
    console: Console,
    headline: Sequence[str],
    *,
    changes: Sequence[tuple[str, float | None, float | None]] = (),
    files: str = "",
    following: Sequence[str] = (),
) -> None:
    """The last lines of a run: what it took, each measure before and after, where the files are, what to run next.

    >>> print_summary(
    ...     Console(width=80), ["60 steps", "2m 05s"], changes=[("sums", 0.41, 0.93)], following=["llmrl eval runs/a"]
    ... )
    done      60 steps · 2m 05s
    sums      .410 -> .930 (+.520)
    next      llmrl eval runs/a
    """
    width = _width(name for name, _, _ in changes)
    _labelled(console, "done", " · ".join(headline), "bold green", width)
    for name, before, after in changes:
        change = f"{_format(before)} -> {_format(after)}"
        if before is not None and after is not None:
            change += f" ({'+' if after >= before else ''}{_format(after - before)})"
        _labelled(console, name, change, "cyan", width)
    if files:
        _labelled(console, "files", files, "cyan", width)
    for command in following:
        _labelled(console, "next" if command == following[0] else "", command, "cyan", width)


def format_duration(seconds: float) -> str:
    """A duration in at most two units.

    >>> [format_duration(value) for value in (4.2, 125, 7500, float("nan"))]
    ['4s', '2m 05s', '2h 05m', '-']
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _format(value: float | None, kind: str = "number") -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    if kind == "percent":
        return f"{100 * value:.0f}%"
    if kind == "int":
        return f"{value:.0f}"
    if kind == "seconds":
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    if kind == "count":
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if value >= size:
                return f"{value / size:.1f}{unit}"
        return f"{value:.0f}"
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 1:
        return f"{value:.4f}".replace("0.", ".", 1) if abs(value) < 0.01 else f"{value:.3f}".replace("0.", ".", 1)
    if 1 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.1e}" if value > 0 else f"{value:.0e}"  # seven characters at most


def _header(columns: Sequence[Column], *more: str) -> str:
    cells = [
        f"{'step':>6}",
        *(f"{column.label:>{column.width}}" for column in columns),
        *(f"{word:>8}" for word in more),
    ]
    return "  ".join(cells)


def _row(columns: Sequence[Column], step: int, metrics: Mapping[str, float | None], *more: str) -> str:
    cells = [f"{step:>6}", *(f"{column.text(metrics):>{column.width}}" for column in columns)]
    return "  ".join([*cells, *(f"{word:>8}" for word in more)])


def _width(labels: Iterable[str]) -> int:
    return max([_LABEL_WIDTH, *(len(label) + 2 for label in labels)])


def _labelled(console: Console, label: str, value: str, style: str, width: int = _LABEL_WIDTH) -> None:
    first, *rest = value.splitlines() or [""]
    _line(console, Text.assemble((f"{label:<{width}}", style), first))
    for line in rest:
        _line(console, Text(" " * width + line))


def _print_block(console: Console, block: RenderableType) -> None:
    """Prints what fills its width; in a file without the blanks at the ends of lines."""
    if console.is_terminal:
        console.print(block)
        return
    with console.capture() as captured:
        console.print(block)
    for line in captured.get().splitlines():
        _line(console, Text(line.rstrip()))


def _line(console: Console, text: Text) -> None:
    if not _can_write(console, text.plain):
        text = Text(_ascii(text.plain))
    console.print(text, soft_wrap=True)  # never folded: one line stays one line in a file


def _can_write(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ascii(text: str) -> str:
    return text.replace("·", "-").encode("ascii", "replace").decode("ascii")


def _printable(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def _verdict(sample: Sample) -> list[str]:
    lines = [] if sample.reward is None else [f"reward {_format(sample.reward)}"]
    return lines if sample.advantage is None else [*lines, f"advantage {_format(sample.advantage)}"]


def _join(pieces: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    joined: list[tuple[str, bool]] = []
    for text, trained in pieces:
        if joined and joined[-1][1] == trained:
            joined[-1] = (joined[-1][0] + text, trained)
        else:
            joined.append((text, trained))
    return [(text, trained) for text, trained in joined if text]


def _shorten(pieces: Sequence[tuple[str, bool]], limit: int) -> list[tuple[str, bool]]:
    """Leaves out the middle of the whole, keeping which part was trained."""
    total = sum(len(text) for text, _ in pieces)
    if total <= limit:
        return list(pieces)
    head, tail = limit // 2, total - (limit - limit // 2)
    kept: list[tuple[str, bool]] = []
    position, marked = 0, False
    for text, trained in pieces:
        start, end = position, position + len(text)
        position = end
        kept.append((text[: max(0, head - start)], trained))
        if not marked and end > head:
            kept.append((f" [... {tail - head} characters ...] ", False))
            marked = True
        kept.append((text[max(0, tail - start) :] if end > tail else "", trained))
    return kept


def _sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of a value in blocks, the mean of a bucket each."""
    if len(values) < 2:
        return ""
    size = max(1, math.ceil(len(values) / width))
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((mean - low) / span * 8))] for mean in means)
