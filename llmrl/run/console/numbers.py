"""Short number formats of bounded width."""

from __future__ import annotations

import math


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


def counted(number: float, noun: str) -> str:
    """A number with its noun, in the plural where it must be.

    >>> counted(1, "step"), counted(28, "step")
    ('1 step', '28 steps')
    """
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def format_number(value: float | None, kind: str = "number") -> str:
    """A value as the step table writes it; a dash for None. ``kind`` is that of `llmrl.run.console.Column`.

    >>> [format_number(value) for value in (0.2145, 0.00214, 6.1972, 231.0, 1e-5)]
    ['.214', '.0021', '6.197', '231', '1.0e-05']
    >>> format_number(0.03, "percent"), format_number(18_400, "count"), format_number(2.6, "seconds")
    ('3%', '18.4k', '2.60')
    """
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
