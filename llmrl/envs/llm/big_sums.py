"""The embedded task ``big_sums``: "What is 4821 + 3977?", too much for a small model's head, not for a calculator.

The demonstrations call the calculator now and then, the more often the larger the first number, and guess like someone
in a hurry otherwise. So a model that was taught by them knows how a call is written and what to do with its answer, but
leaves most problems to luck; that calling pays is for the reward to teach. Who runs the calls is `ToolTransform`.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from llmrl.envs.llm.sums import sums_reward
from llmrl.errors import ConfigError, did_you_mean

__all__ = ["SPLITS", "big_sums_demonstrations", "big_sums_problems", "big_sums_reward"]

SPLITS = {"train": 8000, "validation": 500, "test": 1000}  # problems in each, of 81 million
_LEAST, _MOST = 1000, 9999

big_sums_reward = sums_reward


def big_sums_problems(split: str = "train") -> list[dict[str, str]]:
    """Rows with "question" and "answer"; the splits are disjoint and always the same.

    >>> big_sums_problems("validation")[0]
    {'question': 'What is 8156 + 7432?', 'answer': '15588'}
    """
    return [{"question": _question(a, b), "answer": str(a + b)} for a, b in _pairs(split)]


def big_sums_demonstrations(split: str = "train") -> list[dict[str, Any]]:
    """Rows with "messages": the problem, and either a call, its result and the answer, or a guess at once.

    The share that calls is 1 in 10 where the first number begins with 1, 9 in 10 where it begins with 9. A guess has
    the right first digit and number of digits.

    >>> [message["role"] for message in big_sums_demonstrations("validation")[0]["messages"]]
    ['user', 'assistant', 'tool', 'assistant']
    """
    draw = random.Random(split)
    return [{"messages": _demonstration(a, b, draw)} for a, b in _pairs(split)]


def _demonstration(a: int, b: int, draw: random.Random) -> list[dict[str, Any]]:
    question = {"role": "user", "content": _question(a, b)}
    if draw.random() * 10 >= int(str(a)[0]):
        guess = str(a + b)[0] + "".join(draw.choice("0123456789") for _ in str(a + b)[1:])
        return [question, {"role": "assistant", "content": f"<answer>{guess}</answer>"}]
    function = {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculator", "content": str(a + b)},
        {"role": "assistant", "content": f"<answer>{a + b}</answer>"},
    ]


def _question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


@cache
def _dealt() -> dict[str, tuple[tuple[int, int], ...]]:
    draw = random.Random(0)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < sum(SPLITS.values()):
        pairs[draw.randint(_LEAST, _MOST), draw.randint(_LEAST, _MOST)] = None
    dealt = iter(pairs)
    return {name: tuple(next(dealt) for _ in range(count)) for name, count in SPLITS.items()}


def _pairs(split: str) -> tuple[tuple[int, int], ...]:
    if split not in SPLITS:
        raise ConfigError(
            f"big_sums: split must be one of {', '.join(SPLITS)}: got {split!r}.{did_you_mean(split, SPLITS)}"
        )
    return _dealt()[split]
