"""The embedded task ``sums``: "What is 37 + 58?", answered with a little working and an answer block.

Every pair of two-digit numbers is one problem. A fixed shuffle deals them into three splits that share none, so what is
learnt on ``train`` and measured on ``test`` is addition, not memory. A small model learns it in minutes without a GPU.
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from llmrl.envs.llm.answers.numbers import normalize_answer
from llmrl.errors import ConfigError, did_you_mean

__all__ = ["SPLITS", "sums_demonstrations", "sums_problems", "sums_reward"]

SPLITS = {"test": 1000, "validation": 500, "train": None}  # problems in each; train has the rest of 8100

_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>\s*\Z")


def sums_problems(split: str = "train") -> list[dict[str, str]]:
    """Rows with "question" and "answer"; the splits are disjoint and always the same.

    >>> sums_problems("test")[0].keys()
    dict_keys(['question', 'answer'])
    >>> len(sums_problems("train"))
    6600
    """
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _pairs(split)]


def sums_demonstrations(split: str = "train") -> list[dict[str, Any]]:
    """Rows with "messages": the problem, and an answer that adds the ones, then the tens.

    >>> sums_demonstrations("test")[0]["messages"][1]["role"]
    'assistant'
    """
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": work_out(a, b)},
            ]
        }
        for a, b in _pairs(split)
    ]


def work_out(a: int, b: int) -> str:
    """The answer as demonstrated.

    >>> work_out(37, 58)
    '7+8=15, 3+5+1=9\\n<answer>95</answer>'
    """
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    return f"{a % 10}+{b % 10}={ones}, {tens}={a // 10 + b // 10 + carry}\n<answer>{a + b}</answer>"


def sums_reward(completion: str, answer: str) -> float:
    """1 if the completion ends in an answer block that holds the sum, else 0; how it was reached does not count.

    A completion that goes on after its answer is wrong: otherwise nothing would teach a model to stop.

    >>> sums_reward("7+8=15, 3+5+1=9\\n<answer>95</answer>", "95")
    1.0
    >>> sums_reward("95", "95"), sums_reward("<answer>95</answer> and so on", "95")
    (0.0, 0.0)
    """
    block = _ANSWER.search(completion)
    return float(block is not None and normalize_answer(block[1]) == normalize_answer(str(answer)))


@cache
def _dealt() -> dict[str, tuple[tuple[int, int], ...]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    splits, start = {}, 0
    for name, count in SPLITS.items():
        end = len(pairs) if count is None else start + count
        splits[name] = tuple(pairs[start:end])
        start = end
    return splits


def _pairs(split: str) -> tuple[tuple[int, int], ...]:
    if split not in SPLITS:
        raise ConfigError(
            f"sums: split must be one of {', '.join(SPLITS)}: got {split!r}.{did_you_mean(split, SPLITS)}"
        )
    return _dealt()[split]
