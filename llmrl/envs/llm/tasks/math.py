"""MATH: competition problems whose answers are expressions, compared as mathematics (the ``math`` extra).

math-verify's own deadlines use signals, which work only in the main thread, and a limit on the length of an answer does
not bound the cost of ``9^{9^{9}}``. So algebra runs in a process (`math_process`) that is killed at the deadline.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from llmrl.concurrency.worker_process import WorkerPool
from llmrl.envs.llm.answers import AnswerParser, Blocks, last_boxed, normalize_answer
from llmrl.envs.llm.tasks.task import Row, TaskEnv
from llmrl.errors import DataError, DeadlineError, WorkerError
from llmrl.optional import require

MAX_CHARS = 1000  # a longer answer counts as wrong without comparison
MEMORY_MB = 4096
_DELIMITED = re.compile(r"\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
_OF_NUMBERS = frozenset("0123456789.,/+-${}\\ ")


class MATHRewardParser(AnswerParser):
    """Scores an answer as mathematics: equal to the reference, wrong but in the required form, or missing.

    Reads   the last ``<answer>`` block outside thinking, else the last ``\\boxed{}`` there; "answer": the reference, an
            expression or a solution that boxes one
    Raises  DataError naming the row of an empty reference; MissingDependencyError without math-verify

    Other keys and the arguments are those of `AnswerParser`. A comparison takes at most ``deadline_s`` seconds; answers
    that are undecided by then count as wrong, and ``equality.counters`` counts them.

    >>> parser = MATHRewardParser()
    >>> parser.score(r"Half of it: \\boxed{\\frac{1}{2}}", "0.5"), parser.score("0.5", "0.5")
    (1.0, 0.0)
    """

    def __init__(self, *arguments: Any, deadline_s: float = 5.0, **options: Any):
        super().__init__(*arguments, **options)
        self.equality = MathEquality(deadline_s)

    def find_answer(self, blocks: Blocks) -> str | None:
        return blocks.answers[-1] if blocks.answers else last_boxed(blocks.outside)

    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        references = [_reference(str(text), row) for row, text in enumerate(self.references(td), 1)]
        pairs = zip(references, answers, strict=True)
        equal = iter(self.equality.equal_all([pair for pair in pairs if pair[1] is not None]))
        return [answer is not None and next(equal) for answer in answers]

    def close(self) -> None:
        self.equality.close()


class MATHEnv(TaskEnv):
    """MATH as an environment: a problem, an answer with thinking and answer blocks, a reward of 0, 0.1 or 1.

    The arguments are those of `TaskEnv`; a local file needs the columns ``problem`` and ``solution`` (with the answer
    in its last ``\\boxed{}``) or ``answer``.

    >>> rows = [{"problem": "Half of 1?", "solution": r"It is $\\boxed{\\frac12}$.", "level": "Level 1"}]
    >>> MATHEnv(dataset=rows).reset().get("answer").tolist()
    ['\\\\frac12']
    """

    DATASET = "DigitalLearningGmbH/MATH-lighteval"
    SCORER = MATHRewardParser
    SYSTEM_PROMPT = (
        "You solve mathematical problems. Think step by step between <think> and </think>, then give the final answer "
        "alone, in LaTeX, between <answer> and </answer>, for example <think>Half of 3 is 3/2.</think>"
        "<answer>\\frac{3}{2}</answer>."
    )

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        prompt = cls.row_with_reference(row, number)
        prompt["answer"] = _reference(prompt["answer"], number, "dataset")
        return prompt


def _reference(text: str, row: int | None = None, of: str = "batch") -> str:
    answer = _unboxed(text)
    if not answer:
        where = "" if row is None else f" of row {row} of the {of}"
        raise DataError(
            f"MATHRewardParser: the reference{where} must be an expression, or have one in \\boxed: got {text!r:.120}."
        )
    return answer


class MathEquality:
    """Compares answers as mathematics: ``2\\sqrt{2}`` is ``\\sqrt{8}``, ``\\{1, 2\\}`` is ``\\{2, 1\\}``.

    Call ``equal(reference, answer)``, from any thread, or ``equal_all(pairs)``; both texts may be boxed. The result is
    False after ``deadline_s``; ``counters`` counts "compared", "timeouts" and "too_long".
    Raises  MissingDependencyError without math-verify; DeadlineError, WorkerError if its process does not start

    At most ``processes`` pairs are compared at a time. ``close``, deletion of the object and program exit end the
    processes.

    >>> equality = MathEquality()
    >>> equality.equal("1/2", "0.5"), equality.equal("3", "4")  # numbers need no algebra
    (True, False)
    """

    def __init__(self, deadline_s: float = 5.0, processes: int | None = None):
        require("math_verify", extra="math", used_by="MathEquality")
        self.deadline_s = deadline_s
        self.processes = min(4, os.cpu_count() or 1) if processes is None else processes
        self.counters = {"compared": 0, "timeouts": 0, "too_long": 0}
        self._lock = threading.Lock()
        script = Path(__file__).with_name("math_process.py")
        self._pool = WorkerPool(script, [str(MEMORY_MB)], size=self.processes, who="MathEquality", quiet=True)
        self._decided = lru_cache(maxsize=65536)(self._decide)

    def equal(self, reference: str, answer: str) -> bool:
        """True if ``answer`` is equal to ``reference``."""
        self._count("compared")
        reference, answer = _inside(reference), _inside(answer)
        if reference != answer and len(answer) > MAX_CHARS:
            self._count("too_long")
            return False
        return self._decided(reference, answer)

    def equal_all(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """`equal` for every (reference, answer) pair."""
        if not pairs:
            return []
        with ThreadPoolExecutor(max_workers=min(self.processes, len(pairs))) as pool:
            return list(pool.map(lambda pair: self.equal(*pair), pairs))

    def close(self) -> None:
        self._pool.close()

    def _decide(self, reference: str, answer: str) -> bool:
        if reference == answer:
            return True
        # Most answers are plain numbers, which are compared here, without a process.
        one, other = normalize_answer(reference), normalize_answer(answer)
        if _is_number(reference, one) and _is_number(answer, other):
            return one == other
        with self._pool.worker() as worker:
            try:
                (verdict,) = worker.ask((reference, answer), self.deadline_s)
            except (DeadlineError, WorkerError):  # the comparison did not end, or crashed the process
                self._count("timeouts")
                worker.stop()
                return False
        return verdict

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1


def _unboxed(text: str) -> str:
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _inside(text: str) -> str:
    text = _unboxed(text)
    whole = _DELIMITED.fullmatch(text)
    return text if whole is None else whole[whole.lastindex].strip()


def _is_number(text: str, normal: str) -> bool:
    """True for a single number without other text, as ``x = 3`` and ``\\frac12``, unlike ``2x`` and ``10\\%``."""
    rest = text.rpartition("=")[2].replace("frac", "")
    return _NUMBER.fullmatch(normal) is not None and not set(rest) - _OF_NUMBERS
