"""Decides whether two mathematical answers are equal, in bounded time: numbers at once, algebra by math-verify.

math-verify's own deadlines are signals, which only the main thread may use, and no bound on the length of an answer
bounds what ``9^{9^{9}}`` costs. So algebra is left to a process (`math_process`) that is killed at the deadline.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from llmrl.concurrency.worker_process import WorkerPool
from llmrl.envs.llm.answers import last_boxed, normalize_answer
from llmrl.errors import DeadlineError, WorkerError
from llmrl.optional import require

__all__ = ["MathEquality"]

MAX_CHARS = 1000  # a longer answer is not compared: it is wrong
MEMORY_MB = 4096


class MathEquality:
    """Compares answers as mathematics: ``2\\sqrt{2}`` is ``\\sqrt{8}``, ``\\{1, 2\\}`` is ``\\{2, 1\\}``.

    Calls   ``equal(reference, answer)``, from any thread, or ``equal_all(pairs)``; both may be boxed. False at
            ``deadline_s``, with the reason counted in ``counters``: "compared", "timeouts", "too_long"
    Raises  MissingDependencyError without math-verify; DeadlineError, WorkerError where its process does not start

    At most ``processes`` pairs are compared at a time. ``close`` ends the processes; so do the end of the object and of
    the program.

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
        """Whether ``answer`` is ``reference``."""
        self._count("compared")
        reference, answer = _inside(reference), _inside(answer)
        if reference != answer and len(answer) > MAX_CHARS:
            self._count("too_long")
            return False
        return self._decided(reference, answer)

    def equal_all(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """`equal` of every pair of a reference and an answer."""
        if not pairs:
            return []
        with ThreadPoolExecutor(max_workers=min(self.processes, len(pairs))) as pool:
            return list(pool.map(lambda pair: self.equal(*pair), pairs))

    def close(self) -> None:
        """Ends the processes that are idle; the next comparison starts another one."""
        self._pool.close()

    def _decide(self, reference: str, answer: str) -> bool:
        if reference == answer:
            return True
        one, other = normalize_answer(reference), normalize_answer(answer)
        if _is_number(reference, one) and _is_number(answer, other):
            return one == other
        with self._pool.worker() as worker:
            try:
                (verdict,) = worker.ask((reference, answer), self.deadline_s)
            except (DeadlineError, WorkerError):  # it never ended, or the process died of the question
                self._count("timeouts")
                worker.stop()
                return False
        return verdict

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1


def _inside(text: str) -> str:
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip()
    if (whole := _DELIMITED.fullmatch(text)) is not None:
        text = whole[whole.lastindex].strip()
    return text


def _is_number(text: str, normal: str) -> bool:
    """Whether the text is no more than one number, as ``x = 3`` and ``\\frac12`` are; ``2x`` and ``10\\%`` are not."""
    rest = text.rpartition("=")[2].replace("frac", "")
    return _NUMBER.fullmatch(normal) is not None and not set(rest) - _OF_NUMBERS


_DELIMITED = re.compile(r"\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
_OF_NUMBERS = frozenset("0123456789.,/+-${}\\ ")
