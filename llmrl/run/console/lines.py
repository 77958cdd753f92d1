"""Prints lines of label and value, never wrapped, with only characters that the console can encode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from llmrl.run.console.numbers import format_number
from llmrl.run.printable import printable

_LABEL_WIDTH = 10


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``ok`` is True if it passed, False for a problem, None for information."""

    name: str
    ok: bool | None
    detail: str


def make_console(rank: int | None = None) -> Console:
    """The console of this process; it is silent on every rank but the first (``rank`` None: the RANK variable).

    If the reader of the output (a pipe or a terminal) is gone, the run continues and writes nothing more there.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    # A notebook runs commands in a pseudo-terminal, and its cells cannot move the cursor up.
    interactive = False if "JPY_PARENT_PID" in os.environ else None
    console = Console(quiet=rank != 0, highlight=False, file=_Output(sys.stdout), force_interactive=interactive)
    console.push_render_hook(_PrintableText())
    return console


class _PrintableText(RenderHook):
    """Makes all text of a console printable, after rich has added its own control sequences beside it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


@dataclass(frozen=True)
class _Printable:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self.inner, options):
            yield part if part.control else Segment(printable(part.text), part.style)


class _Output:
    """A stream that is redirected to the null device once a write fails, with standard error if that is the same."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or 0

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except OSError:
            # The descriptor itself is redirected, because logging and C libraries write to it as well.
            gone = self._stream.fileno()
            same = [number for number in {gone, 2} if os.path.sameopenfile(number, gone)]
            null = os.open(os.devnull, os.O_WRONLY)
            for number in same:
                os.dup2(null, number)
            os.close(null)


def print_plan(console: Console, title: str, rows: Sequence[tuple[str, str]], *, right: str = "") -> None:
    """A heading, then aligned rows of label and value; a value's further lines are indented under its first."""
    gap = max(2, min(console.width, 120) - len(title) - len(right))
    print_line(console, Text.assemble((title, "bold"), " " * gap if right else "", (right, "dim")))
    width = _width(label for label, _ in rows)
    for label, value in rows:
        print_labelled(console, label, value, "cyan", width)


def note(console: Console, text: str) -> None:
    """Prints a note, above a live panel if there is one on this console."""
    print_labelled(console, "note", text, "blue")


def warn(console: Console, text: str) -> None:
    """Prints a warning, above a live panel if there is one on this console."""
    print_labelled(console, "warn", text, "yellow")


def print_summary(
    console: Console,
    headline: Sequence[str],
    *,
    changes: Sequence[tuple[str, float | None, float | None]] = (),
    warnings: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    files: str = "",
    following: Sequence[str] = (),
) -> None:
    """The last lines of a run: headline, each measure before and after, warnings, facts, files, commands to run next.

    >>> print_summary(
    ...     Console(width=80), ["60 steps", "2m 05s"], changes=[("sums", 0.41, 0.93)], following=["llmrl eval runs/a"]
    ... )
    done      60 steps · 2m 05s
    sums      .410 -> .930 (+.520)
    next      llmrl eval runs/a
    """
    width = _width([*(name for name, _, _ in changes), *(name for name, _ in facts)])
    print_labelled(console, "done", " · ".join(headline), "bold green", width)
    for name, before, after in changes:
        change = f"{format_number(before)} -> {format_number(after)}"
        if before is not None and after is not None:
            change += f" ({'+' if after >= before else ''}{format_number(after - before)})"
        print_labelled(console, name, change, "cyan", width)
    for number, text in enumerate(warnings):
        print_labelled(console, "" if number else "warn", text, "yellow", width)
    for name, text in facts:
        print_labelled(console, name, text, "cyan", width)
    if files:
        print_labelled(console, "files", files, "cyan", width)
    for command in following:
        print_labelled(console, "next" if command == following[0] else "", command, "cyan", width)


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """One line per finding."""
    signs = {True: ("ok  ", "green"), False: ("NO  ", "bold red"), None: ("--  ", "dim")}
    for finding in findings:
        text = Text.assemble(signs[finding.ok], f"{finding.name:<14}", finding.detail)
        console.print(text, soft_wrap=True)


def print_labelled(console: Console, label: str, value: str, style: str, width: int = _LABEL_WIDTH) -> None:
    """A label in ``style`` and a value; the value's further lines are indented under its first."""
    first, *rest = value.splitlines() or [""]
    print_line(console, Text.assemble((f"{label:<{width}}", style), first))
    for line in rest:
        print_line(console, Text(" " * width + line))


def print_line(console: Console, text: Text) -> None:
    """Prints one line of any length, in plain ASCII if the console cannot encode it."""
    if not can_write(console, text.plain):
        text = Text(ascii_only(text.plain))
    console.print(text, soft_wrap=True)  # never wrapped: one line stays one line in a file


def print_block(console: Console, block: RenderableType) -> None:
    """Prints a renderable; in a file without trailing blanks."""
    if console.is_terminal:
        console.print(block)
        return
    with console.capture() as captured:
        console.print(block)
    for line in captured.get().splitlines():
        print_line(console, Text(line.rstrip()))


def can_write(console: Console, text: str) -> bool:
    """True if the console's encoding has every character."""
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def ascii_only(text: str) -> str:
    """The text with a question mark for each character outside ASCII; a middle dot becomes a hyphen, ± becomes +-.

    >>> ascii_only("grpo · ✓")
    'grpo - ?'
    """
    return text.replace("·", "-").replace("±", "+-").encode("ascii", "replace").decode("ascii")


def _width(labels: Iterable[str]) -> int:
    return max([_LABEL_WIDTH, *(len(label) + 2 for label in labels)])
