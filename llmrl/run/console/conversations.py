"""Sample conversations, with the tokens that are trained marked and the verdict at the right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from llmrl.run.console.lines import can_write, print_block
from llmrl.run.console.numbers import format_number

__all__ = ["Sample", "print_conversations"]


@dataclass(frozen=True)
class Sample:
    """One conversation to show: pieces of text, each with whether its tokens are trained, and how it was judged."""

    pieces: Sequence[tuple[str, bool]]
    reward: float | None = None
    advantage: float | None = None
    label: str = ""


def print_conversations(console: Console, samples: Sequence[Sample], *, max_chars: int = 1200) -> None:
    """Sample conversations, the trained part bright on a terminal and in «» elsewhere; the verdict stands at the right.

    Text longer than ``max_chars`` loses its middle. Control characters that a model wrote are shown, not obeyed.
    """
    left, right = ("«", "»") if can_write(console, "«»") else ("<<", ">>")
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
        print_block(console, Group(Rule(style="dim", characters="-"), table))
    if samples:
        print_block(console, Rule(style="dim", characters="-"))


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


def _join(pieces: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    joined: list[tuple[str, bool]] = []
    for text, trained in pieces:
        if joined and joined[-1][1] == trained:
            joined[-1] = (joined[-1][0] + text, trained)
        else:
            joined.append((text, trained))
    return [(text, trained) for text, trained in joined if text]


def _printable(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def _verdict(sample: Sample) -> list[str]:
    lines = [] if sample.reward is None else [f"reward {format_number(sample.reward)}"]
    return lines if sample.advantage is None else [*lines, f"advantage {format_number(sample.advantage)}"]
