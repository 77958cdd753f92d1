"""The embedded tasks ``sums`` and ``big_sums``: additions that a small model learns in minutes without a GPU.

``sums`` asks "What is 37 + 58?". A fixed shuffle of all pairs of two-digit numbers gives three splits that share no
problem, so a result on ``test`` measures addition, not memory. ``big_sums`` asks "What is 4821 + 3977?", which needs a
calculator. Its demonstrations call one in some rows and guess in the others: they teach a model how to write a call,
and the reward then teaches it to prefer calls.
"""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import islice
from typing import Any

from llmrl.errors import check_choice

SPLITS = {"test": 1000, "validation": 500, "train": None}  # problems in each; train has the rest of 8100
BIG_SPLITS = {"train": 8000, "validation": 500, "test": 1000}  # problems in each, of 81 million
_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>\s*\Z")

Pairs = dict[str, tuple[tuple[int, int], ...]]
Rows = list[dict[str, Any]]


def sums_problems(split: str = "train") -> Rows:
    """Rows with "question" and "answer"; the splits are disjoint and always the same.

    >>> len(sums_problems("train")), sums_problems("test")[0].keys()
    (6600, dict_keys(['question', 'answer']))
    """
    return [_problem(a, b) for a, b in _split_of(_sums(), split, "sums")]


def big_sums_problems(split: str = "train") -> Rows:
    """`sums_problems` with numbers of four digits.

    >>> big_sums_problems("validation")[0]
    {'question': 'What is 8156 + 7432?', 'answer': '15588'}
    """
    return [_problem(a, b) for a, b in _split_of(_big_sums(), split, "big_sums")]


def sums_demonstrations(split: str = "train") -> Rows:
    """Rows with "messages": the problem, and an answer that adds the ones, then the tens.

    >>> sums_demonstrations("test")[0]["messages"][1]["role"]
    'assistant'
    """
    return [
        {"messages": [_question(a, b), {"role": "assistant", "content": work_out(a, b)}]}
        for a, b in _split_of(_sums(), split, "sums")
    ]


def big_sums_demonstrations(split: str = "train") -> Rows:
    """Rows with "messages": the problem, and either a call, its result and the answer, or an immediate guess.

    The share with a call is d in 10, where d is the first digit of the first number. A guess has the right first digit
    and number of digits.

    >>> [message["role"] for message in big_sums_demonstrations("validation")[0]["messages"]]
    ['user', 'assistant', 'tool', 'assistant']
    """
    draw = random.Random(split)
    return [{"messages": _call_or_guess(a, b, draw)} for a, b in _split_of(_big_sums(), split, "big_sums")]


def sums_preferences(split: str = "train") -> Rows:
    """Rows with "prompt", "chosen" (the demonstrated answer) and "rejected" (the same with one wrong digit sum).

    >>> {name: text.splitlines()[-1] for name, text in sums_preferences("test")[0].items() if name != "prompt"}
    {'chosen': '<answer>85</answer>', 'rejected': '<answer>95</answer>'}
    """
    draw = random.Random(split)
    return [
        {"prompt": _problem(a, b)["question"], "chosen": work_out(a, b), "rejected": _slip(a, b, draw)}
        for a, b in _split_of(_sums(), split, "sums")
    ]


def sums_mistakes(split: str = "train") -> Rows:
    """Rows with "prompt", "chosen" (the demonstrated answer) and "rejected" (the same with one mistake of any size).

    Either a sum, the carry, a copied digit, a digit of the answer or the form is wrong, and later steps follow from the
    mistake; at least half of the wrong sums are off by at most 2, as in a model's answers. Or a few characters are
    wrong, as in answers of a badly trained model. Each problem comes 12 times with different mistakes, because the
    judge learns more from new mistakes than from repeated ones.

    >>> {name: text.splitlines()[0] for name, text in sums_mistakes("test")[0].items() if name != "prompt"}
    {'chosen': '5+0=5, 2+6=8', 'rejected': '5+0=5, 2+6+1=9'}
    """
    draw = random.Random(split)
    return [
        {"prompt": _problem(a, b)["question"], "chosen": work_out(a, b), "rejected": _mistaken(a, b, draw)}
        for _ in range(12)
        for a, b in _split_of(_sums(), split, "sums")
    ]


def sums_reward(completion: str, answer: str) -> float:
    """1 if the completion ends with an answer block that holds the sum, else 0, regardless of the text before it.

    A completion that continues after its answer is wrong: otherwise nothing would teach a model to stop.

    >>> sums_reward("7+8=15, 3+5+1=9\\n<answer>95</answer>", "95")
    1.0
    >>> sums_reward("95", "95"), sums_reward("<answer>95</answer> and so on", "95")
    (0.0, 0.0)
    """
    from llmrl.envs.llm.answers import normalize_answer

    block = _ANSWER.search(completion)
    return float(block is not None and normalize_answer(block[1]) == normalize_answer(str(answer)))


def work_out(a: int, b: int) -> str:
    """The demonstrated answer.

    >>> work_out(37, 58)
    '7+8=15, 3+5+1=9\\n<answer>95</answer>'
    """
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    return f"{a % 10}+{b % 10}={ones}, {tens}={a // 10 + b // 10 + carry}\n<answer>{a + b}</answer>"


def _slip(a: int, b: int, draw: random.Random) -> str:
    """`work_out` with a wrong sum of the ones or of the tens, and later steps that follow from it."""
    wrong = [draw.choice((-2, -1, 1, 2)), 0]
    draw.shuffle(wrong)
    ones = a % 10 + b % 10 + wrong[0]
    ones = ones if 0 <= ones <= 18 else a % 10 + b % 10 - wrong[0]
    carry = ones // 10
    tens = a // 10 + b // 10 + carry + wrong[1]
    terms = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    return f"{a % 10}+{b % 10}={ones}, {terms}={tens}\n<answer>{10 * tens + ones % 10}</answer>"


def _mistaken(a: int, b: int, draw: random.Random) -> str:
    """`work_out` with one mistake, in a sum 4 times in 10, or with a few wrong characters."""
    kind = draw.choice(("ones", "tens", "ones", "tens", "carry", "copy", "answer", "form", "characters", "characters"))
    if kind == "characters":
        return _damaged(work_out(a, b), str(a + b), draw)
    digits = [a % 10, b % 10, a // 10, b // 10]
    if kind == "copy":
        digits[draw.randrange(4)] += draw.randint(1, 9)
        digits = [digit % 10 for digit in digits]
    # Later steps are computed from the mistake, as a model would do.
    ones = digits[0] + digits[1]
    if kind == "ones":
        ones = _other(ones, range(19), draw)
    carry = ones // 10 if kind != "carry" else 1 - ones // 10
    tens = digits[2] + digits[3] + carry
    if kind == "tens":
        tens = _other(tens, range(1, 20), draw)
    answer = str(10 * tens + ones % 10)
    if kind == "answer":
        place = draw.randrange(len(answer))
        other = draw.choice([digit for digit in "0123456789" if digit != answer[place]])
        answer = answer[:place] + other + answer[place + 1 :]
    terms = f"{digits[2]}+{digits[3]}" + ("+1" if carry else "")
    block = f"<answer>{answer}</answer>"
    if kind == "form":
        block = draw.choice((answer, f"{block}, {terms}={tens}", f"<answer>{answer}", ""))
    return f"{digits[0]}+{digits[1]}={ones}, {terms}={tens}\n{block}"


def _other(right: int, numbers: range, draw: random.Random) -> int:
    """A wrong one of the ``numbers``: half the time any, half the time one that differs from ``right`` by at most 2."""
    others = [number for number in numbers if number != right]
    near = [number for number in others if abs(number - right) <= 2]
    return draw.choice(near if draw.random() < 0.5 else others)


def _damaged(text: str, answer: str, draw: random.Random) -> str:
    """``text``, sometimes cut off, with one to four random character edits; repeated until the answer is wrong."""
    damaged = text
    while sums_reward(damaged, answer):
        damaged = text if draw.random() < 0.9 else text[: draw.randrange(1, len(text))]
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(damaged))
            other = draw.choice(("", draw.choice(text), draw.choice(text) + damaged[place], 2 * damaged[place]))
            damaged = damaged[:place] + other + damaged[place + 1 :] or text[0]
    return damaged


def _call_or_guess(a: int, b: int, draw: random.Random) -> list[dict[str, Any]]:
    if draw.random() * 10 >= int(str(a)[0]):
        guess = str(a + b)[0] + "".join(draw.choice("0123456789") for _ in str(a + b)[1:])
        return [_question(a, b), {"role": "assistant", "content": f"<answer>{guess}</answer>"}]
    function = {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}
    return [
        _question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculator", "content": str(a + b)},
        {"role": "assistant", "content": f"<answer>{a + b}</answer>"},
    ]


def _problem(a: int, b: int) -> dict[str, str]:
    return {"question": f"What is {a} + {b}?", "answer": str(a + b)}


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": _problem(a, b)["question"]}


@cache
def _sums() -> Pairs:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rest = iter(pairs)
    return {name: tuple(islice(rest, count)) for name, count in SPLITS.items()}


@cache
def _big_sums() -> Pairs:
    draw = random.Random(0)
    pairs: dict[tuple[int, int], None] = {}  # a dict keeps the order of the draws
    while len(pairs) < sum(BIG_SPLITS.values()):
        pairs[draw.randint(1000, 9999), draw.randint(1000, 9999)] = None
    rest = iter(pairs)
    return {name: tuple(islice(rest, count)) for name, count in BIG_SPLITS.items()}


def _split_of(pairs: Pairs, split: str, task: str) -> tuple[tuple[int, int], ...]:
    check_choice(task, "split", split, pairs)
    return pairs[split]
