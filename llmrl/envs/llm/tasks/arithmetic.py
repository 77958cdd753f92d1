"""The embedded task ``arithmetic``: plus, minus and times up to ten, plainly and in stories, for a small chat model.

It needs a pretrained model, which knows the words and most of the results: examples or a reward teach it to answer
shortly and to be sure. No two splits have the same numbers with one sign, in either order, so a result on ``test``
measures new problems.
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from llmrl.errors import check_choice

SYSTEM_PROMPT = "Solve the problem. End with 'The answer is N.', where N is a number."
SPLITS = {"test": 42, "validation": 21, "train": None}  # pairs of numbers in each, in any order
_LARGEST = 10
_NAMES = ("Tom", "Mia", "Sam", "Lily", "Ben", "Anna", "Leo", "Ruth")
_THINGS = ("apples", "books", "coins", "pencils", "cards", "eggs", "stamps", "marbles")
_FORMS = {
    "plus": (
        "What is {a} plus {b}?",
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    ),
    "minus": (
        "What is {a} minus {b}?",
        "{name} has {a} {things} and gives {b} away. How many {things} does {name} have left?",
    ),
    "times": (
        "What is {a} times {b}?",
        "{name} has {a} boxes with {b} {things} in each. How many {things} are in them?",
    ),
}
_SIGNS = {"plus": "+", "minus": "-", "times": "*"}

Rows = list[dict[str, Any]]


def arithmetic_problems(split: str = "train") -> Rows:
    """Rows with "question" and "answer"; the splits are disjoint and always the same.

    >>> arithmetic_problems("test")[0].keys(), len(arithmetic_problems("test"))
    (dict_keys(['question', 'answer']), 120)
    """
    return [{"question": question, "answer": str(result)} for question, _, result in _problems(split)]


def arithmetic_demonstrations(split: str = "train") -> Rows:
    """Rows with "messages": the system prompt, a problem, and its answer in two short sentences.

    >>> arithmetic_demonstrations("test")[0]["messages"][-1]["content"].split(". ")[-1][:13]
    'The answer is'
    """
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{term} = {result}. The answer is {result}."},
            ]
        }
        for question, term, result in _problems(split)
    ]


def arithmetic_reward(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer, else 0.

    >>> arithmetic_reward("7 + 5 = 12. The answer is 12.", "12"), arithmetic_reward("12, no, 13", "12")
    (1.0, 0.0)
    """
    numbers = re.findall(r"-?\d[\d,]*", completion)
    return float(bool(numbers) and numbers[-1].rstrip(",") == answer)


def _problems(split: str) -> list[tuple[str, str, int]]:
    """Question, term and result of each problem: every pair of numbers plainly and in a story."""
    check_choice("arithmetic", "split", split, SPLITS)
    draw, found = random.Random(f"arithmetic {split}"), []
    for kind, a, b, result in _splits()[split]:
        for form in _FORMS[kind]:
            question = form.format(a=a, b=b, name=draw.choice(_NAMES), things=draw.choice(_THINGS))
            found.append((question, f"{a} {_SIGNS[kind]} {b}", result))
    draw.shuffle(found)
    return found


@cache
def _splits() -> dict[str, list[tuple[str, int, int, int]]]:
    numbers = range(1, _LARGEST + 1)
    pairs = [[("plus", a, b, a + b), ("plus", b, a, a + b)] for a in numbers for b in numbers if a <= b]
    pairs += [[("minus", a + b, b, a)] for a in numbers for b in numbers]
    pairs += [[("times", a, b, a * b), ("times", b, a, a * b)] for a in numbers for b in numbers if a <= b]
    random.Random("arithmetic").shuffle(pairs)
    first, second = SPLITS["test"], SPLITS["test"] + SPLITS["validation"]
    parts = {"test": pairs[:first], "validation": pairs[first:second], "train": pairs[second:]}
    # 3 + 3 is the same in either order.
    return {name: list(dict.fromkeys(term for terms in part for term in terms)) for name, part in parts.items()}
