"""Measured figures with their limits, as lines and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Figure", "constants"]


@dataclass(frozen=True)
class Figure:
    """A figure of a part.

    value   a number, or words: a version, the reason of a SKIP or a FAIL
    least, most  bounds of the number; without both it is not judged
    cause   a cause of the memory plan, of which ``value`` is measured / planned
    said    the verdict, for what is not a number
    """

    name: str
    value: float | str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    cause: str = ""
    said: Literal["SKIP", "FAIL", ""] = ""

    @classmethod
    def skipped(cls, name: str, reason: str) -> Figure:
        return cls(name, reason, said="SKIP")

    @classmethod
    def failed(cls, name: str, reason: str) -> Figure:
        return cls(name, reason, said="FAIL")

    @property
    def verdict(self) -> str:
        """PASS, FAIL, SKIP, or - for a figure that is not judged.

        >>> [Figure("x", value, most=2.0).verdict for value in (2.0, 2.1, float("nan"))], Figure("x", 3.0).verdict
        (['PASS', 'FAIL', 'FAIL'], '-')
        """
        if self.said or (self.least is None and self.most is None):
            return self.said or "-"
        assert not isinstance(self.value, str), "only numbers have limits"
        low = self.least is None or self.value >= self.least
        high = self.most is None or self.value <= self.most
        return "PASS" if low and high else "FAIL"

    def __str__(self) -> str:
        """The line of the figure.

        >>> print(Figure("head/time", 1.234, "x", most=1.7))
        PASS  head/time  1.23 x  (<= 1.7)
        """
        bounds = ((">=", self.least), ("<=", self.most))
        limits = [f"{sign} {bound:.4g}" for sign, bound in bounds if bound is not None]
        shown = self.value if isinstance(self.value, str) else f"{self.value:.3g} {self.unit}".strip()
        return "  ".join([f"{self.verdict:4}", self.name, shown, *([f"({', '.join(limits)})"] if limits else [])])

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"verdict": self.verdict}


def constants(figures: Iterable[Figure]) -> list[str]:
    """Lines with what the memory plan assumes: the range of the measured values of each cause."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for figure in figures:
        if figure.cause and not isinstance(figure.value, str):
            found[figure.cause, figure.unit].append(figure.value)
    lines = []
    for (cause, unit), values in found.items():
        low, high = f"{min(values):.3g}", f"{max(values):.3g}"
        shown = high if low == high else f"{low} to {high}"
        lines.append(f"{cause:20} {shown} {'x the plan' if unit == 'x' else unit}")
    return lines
