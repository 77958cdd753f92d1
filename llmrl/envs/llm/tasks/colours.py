"""The embedded task ``colours``: naming an image's colour, which a small model learns in a minute.

An image has one colour, in one of many shades and sizes. The splits share no shade, so a result on ``test`` measures
colour recognition, not memory of an image.
"""

from __future__ import annotations

import colorsys
import random
from functools import cache
from typing import Any

from llmrl.errors import check_choice
from llmrl.optional import require

COLOURS = ("red", "yellow", "green", "cyan", "blue", "magenta")  # 60 degrees of hue apart
SPLITS = {"test": 300, "validation": 120, "train": 1200}  # problems in each
_SPREAD = 15.0  # degrees of hue in both directions
_SIZES = (8, 16, 24)

Rows = list[dict[str, Any]]


def colours_problems(split: str = "train") -> Rows:
    """Rows with "question", "image" (a PIL image) and "answer"; the splits are disjoint and always the same.

    >>> row = colours_problems("validation")[0]
    >>> row["question"], row["answer"], row["image"].mode
    ('What colour is it?', 'red', 'RGB')
    """
    check_choice("colours", "split", split, SPLITS)
    make = require("PIL.Image", extra="vision", used_by="the task colours").new
    return [
        {"question": "What colour is it?", "image": make("RGB", size, shade), "answer": COLOURS[number % len(COLOURS)]}
        for number, (shade, size) in enumerate(_shades()[split])
    ]


def colours_demonstrations(split: str = "train") -> Rows:
    """The rows of `colours_problems` as demonstrations, with a random colour as every third answer to each colour.

    A model learns the names from them, but its samples are often wrong, as the examples are; the reward corrects that.
    """
    draw = random.Random(split)
    return [
        {**row, "answer": draw.choice(COLOURS)} if number // len(COLOURS) % 3 == 0 else row  # the colours take turns
        for number, row in enumerate(colours_problems(split))
    ]


def colours_reward(completion: str, answer: str) -> float:
    """1 if the completion is exactly the name of the colour, else 0.

    >>> colours_reward("red", "red"), colours_reward("red red", "red")
    (1.0, 0.0)
    """
    return float(completion.strip() == answer)


@cache
def _shades() -> dict[str, list[tuple[tuple[int, int, int], tuple[int, int]]]]:
    draw, used, splits = random.Random(0), set(), {}
    for name, count in SPLITS.items():
        rows: list[Any] = []
        while len(rows) < count:
            hue = (60 * (len(rows) % len(COLOURS)) + draw.uniform(-_SPREAD, _SPREAD)) / 360 % 1
            shade = tuple(
                round(255 * part) for part in colorsys.hsv_to_rgb(hue, draw.uniform(0.6, 1), draw.uniform(0.5, 1))
            )
            if shade not in used:
                used.add(shade)
                rows.append((shade, (draw.choice(_SIZES), draw.choice(_SIZES))))
        splits[name] = rows
    return splits
