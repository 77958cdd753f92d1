"""Countdown: make a target out of given numbers by + - * and /. Problems are generated, or come from a dataset.

The calculator (`llmrl.tools.calculator`) evaluates expressions: a bounded parser, never ``eval``.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from llmrl.envs.llm.answers import AnswerParser
from llmrl.envs.llm.tasks.task import Row, TaskEnv, row_label
from llmrl.errors import ConfigError, DataError, check_choice, did_you_mean
from llmrl.tools.base import ToolError
from llmrl.tools.calculator import evaluate

SPLITS = {"train": 10_000, "validation": 500, "test": 500}  # problems in each, by default
MAX_CHARS = 200

_SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "$": "", "\\": ""}  # the calculator handles other signs
_EXPRESSION = re.compile(r"[\d+\-*/()\s\u00d7\u00b7\u00f7\u2212]+")


def countdown_correct(expression: str, numbers: Sequence[int], target: int) -> bool:
    """True if ``expression`` makes ``target`` by + - * / and parentheses, with each of ``numbers`` at most once.

    An equals sign and the text after it are ignored; powers, floor division and decimals are not allowed.

    >>> countdown_correct("(55 + 36 - 7) - 19 = 65", [19, 36, 55, 7], 65)
    True
    >>> countdown_correct("7 * 7", [7, 3], 49), countdown_correct("45**67**89", [45, 67, 89], 1)
    (False, False)
    """
    for sign, plain in _SIGNS.items():
        expression = expression.replace(sign, plain)
    expression = expression.partition("=")[0].strip()
    if len(expression) > MAX_CHARS or "**" in expression or "//" in expression or not _EXPRESSION.fullmatch(expression):
        return False
    # A difference of counters keeps only positive counts: numbers that are used more often than given.
    if Counter(map(int, re.findall(r"\d+", expression))) - Counter(numbers):
        return False
    try:
        value = evaluate(expression)
    except ToolError:  # not an expression, or a division by zero
        return False
    return math.isclose(value, target, rel_tol=1e-9)  # divisions are in floating point


def countdown_problems(
    split: str = "train", count: int | None = None, *, size: int | tuple[int, int] = (3, 4), largest: int = 99
) -> list[dict[str, Any]]:
    """Problems that have a solution: rows with "nums" and "target", the columns of the public dataset.

    Returns  always the same rows for a split; the set of numbers determines the split, so splits share no problem
    Raises   ConfigError for an unknown split, or fewer than two numbers

    ``size`` is the count of numbers in a problem, or (minimum, maximum); numbers are within [1, ``largest``], targets
    within [10, ``largest``].

    >>> countdown_problems("test", 2)[0].keys()
    dict_keys(['nums', 'target'])
    """
    check_choice("countdown_problems", "split", split, SPLITS)
    least, most = (size, size) if isinstance(size, int) else size
    if not 2 <= least <= most or largest < 10:
        raise ConfigError(
            f"countdown_problems: size must be at least 2 numbers and largest at least 10: got {size} and {largest}."
        )
    draw = random.Random(f"countdown {split} {least} {most} {largest}")
    rows: list[dict[str, Any]] = []
    while len(rows) < (SPLITS[split] if count is None else count):
        # Draws until there are enough, because many sets belong to another split and some attempts reach no target.
        numbers = [draw.randint(1, largest) for _ in range(draw.randint(least, most))]
        if _split_of(numbers) == split and (target := _reach(numbers, largest, draw)) is not None:
            rows.append({"nums": numbers, "target": target})
    return rows


class CountdownRewardParser(AnswerParser):
    """Scores the expression in the answer block: right, wrong but in the required form, or missing.

    Reads   "nums", "target"   the numbers that may be used, each at most once, and the number to reach
    Raises  MissingKeyError without them

    Output keys and arguments are those of `AnswerParser`; `countdown_correct` checks the expression.

    >>> from llmrl.testing import ScriptedPolicy
    >>> env = CountdownEnv(dataset=[{"nums": [3, 5, 2], "target": 16}])  # appends one
    >>> env.step(ScriptedPolicy(["<answer>(3 + 5) * 2</answer>"])(env.reset()))["next", "reward"].item()
    1.0
    """

    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        rows = zip(answers, self.references(td, "nums"), self.references(td, "target"), strict=True)
        return [answer is not None and countdown_correct(answer, nums, target) for answer, nums, target in rows]


class CountdownEnv(TaskEnv):
    """Countdown as an environment: numbers and a target, an expression in an answer block, a reward of 0, 0.1 or 1.

    The arguments are those of `TaskEnv`. Without ``dataset`` the problems are `countdown_problems`; a local file or a
    hub dataset (such as Jiayi-Pan/Countdown-Tasks-3to4) needs the columns ``nums`` and ``target``.

    >>> env = CountdownEnv(dataset=[{"nums": [3, 5, 2], "target": 16}])
    >>> env.reset()["history"].prompt.to_chats()[0][1]["content"]
    'Make 16 out of the numbers 3, 5, 2. Use each of them at most once.'
    """

    SCORER = CountdownRewardParser
    SYSTEM_PROMPT = (
        "You solve number puzzles with +, -, *, / and parentheses. Think between <think> and </think>, then give the "
        "expression alone between <answer> and </answer>, for example <think>From 2, 5 and 8 make 26: 8 * 2 is 16, and "
        "5 * 2 is 10, but 2 is there once only. (8 + 5) * 2 is 26.</think><answer>(8 + 5) * 2</answer>."
    )

    @classmethod
    def rows(
        cls, dataset: str | Path | None = None, *, name: str | None = None, split: str | None = None
    ) -> Sequence[Row]:
        if dataset is None:
            return countdown_problems(split or "train")
        return super().rows(dataset, name=name, split=split)

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        where = row_label(number)
        for column in ("nums", "target"):
            if row.get(column) is None:
                columns = f"its columns are {', '.join(row)}.{did_you_mean(column, row)}"
                found = f"{column} is empty." if column in row else columns
                raise DataError(f"CountdownEnv: {where} must have the columns nums and target: {found}")
        try:
            nums, target = [int(n) for n in row["nums"]], int(row["target"])
        except (TypeError, ValueError):
            nums, target = [], 0
        if not nums:
            had = f"{where} has {row['nums']!r:.60} and {row['target']!r:.30}"
            raise DataError(f"CountdownEnv: nums must be a list of whole numbers, and target a whole number: {had}.")
        query = f"Make {target} out of the numbers {', '.join(map(str, nums))}. Use each of them at most once."
        return {"query": query, "answer": str(target), "nums": nums, "target": target}


def _split_of(numbers: list[int]) -> str:
    """The split of a set of numbers, independent of their order: nine of ten sets are for training."""
    # Sorted, so that all orders of the same numbers are in one split; not by `hash`, which differs per process.
    deal = zlib.crc32(" ".join(map(str, sorted(numbers))).encode()) % 20
    return "test" if deal == 19 else "validation" if deal == 18 else "train"


def _reach(numbers: list[int], largest: int, draw: random.Random) -> int | None:
    """A target reached by combining all of the numbers at random; None if the result is not a valid target."""
    values = draw.sample(numbers, len(numbers))
    while len(values) > 1:
        a, b = values.pop(draw.randrange(len(values))), values.pop(draw.randrange(len(values)))
        results = [a + b, abs(a - b), a * b]
        if b and a % b == 0:
            results.append(a // b)
        values.append(draw.choice(results))
    return values[0] if 10 <= values[0] <= largest and values[0] not in numbers else None
