"""Prints sample conversations with trained tokens marked, reward and advantage at the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from llmrl.run.console.lines import can_write, print_block
from llmrl.run.console.numbers import format_number
from llmrl.run.printable import printable


@dataclass(frozen=True)
class Sample:
    """One conversation to show: pieces of text, each with a flag (True: its tokens are trained), and its scores."""

    pieces: Sequence[tuple[str, bool]]
    reward: float | None = None
    advantage: float | None = None
    label: str = ""
    notes: Sequence[str] = ()  # lines below it


def print_conversations(console: Console, samples: Sequence[Sample], *, max_chars: int = 1200) -> None:
    """Prints conversations; the trained part is bright on a terminal and in «» elsewhere; scores are at the right.

    The middle of a text longer than ``max_chars`` is left out. Control characters are escaped.
    """
    left, right = ("«", "»") if can_write(console, "«»") else ("<<", ">>")
    for sample in samples:
        body = Text()
        for piece, trained in _shorten(sample.pieces, max_chars):
            if console.is_terminal and console.color_system:
                body.append(printable(piece), "bold green" if trained else "dim")
            else:
                body.append(f"{left}{printable(piece)}{right}" if trained else printable(piece))
        scores = (("reward", sample.reward), ("advantage", sample.advantage))
        lines = [f"{name} {format_number(value)}" for name, value in scores if value is not None]
        verdict = Text("\n".join(filter(None, [sample.label, *lines])), justify="right")
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_row(body, verdict)
        notes = [Text(printable(note), "dim") for note in sample.notes]
        print_block(console, Group(Rule(style="dim", characters="-"), table, *notes))
    if samples:
        print_block(console, Rule(style="dim", characters="-"))


def _shorten(pieces: Sequence[tuple[str, bool]], limit: int) -> list[tuple[str, bool]]:
    """Leaves out the middle of the conversation and joins neighbouring pieces with the same trained flag."""
    total = sum(len(text) for text, _ in pieces)
    kept = list(pieces)
    if total > limit:
        head, tail = limit // 2, total - (limit - limit // 2)
        kept, position, marked = [], 0, False
        for text, trained in pieces:
            start, end = position, position + len(text)
            position = end
            kept.append((text[: max(0, head - start)], trained))
            if not marked and end > head:
                kept.append((f" [... {tail - head} characters ...] ", False))
                marked = True
            kept.append((text[max(0, tail - start) :] if end > tail else "", trained))
    groups = groupby((piece for piece in kept if piece[0]), key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), trained) for trained, group in groups]
