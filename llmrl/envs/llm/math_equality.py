"""Decides whether two mathematical answers are equal, in bounded time: numbers at once, algebra by math-verify.

math-verify's own deadlines are signals, which only the main thread may use, and no bound on the length of an answer
bounds what ``9^{9^{9}}`` costs. So algebra is left to a process (`math_process`) that is killed at the deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from llmrl.envs.llm.answers import last_boxed, normalize_answer
from llmrl.errors import DeadlineError
from llmrl.optional import require

__all__ = ["MathEquality"]

MAX_CHARS = 1000  # a longer answer is not compared: it is wrong
MEMORY_MB = 4096
START_S = 120.0  # importing SymPy, on a busy machine


class MathEquality:
    """Compares answers as mathematics: ``2\\sqrt{2}`` is ``\\sqrt{8}``, ``\\{1, 2\\}`` is ``\\{2, 1\\}``.

    Calls   ``equal(reference, answer)``, from any thread, or ``equal_all(pairs)``; both may be boxed. False at
            ``deadline_s``, with the reason counted in ``counters``: "compared", "timeouts", "too_long"
    Raises  MissingDependencyError without math-verify; DeadlineError where its process does not start

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
        self._free = threading.BoundedSemaphore(self.processes)
        self._idle: list[_Process] = []
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
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.stop()

    def _decide(self, reference: str, answer: str) -> bool:
        if reference == answer:
            return True
        one, other = normalize_answer(reference), normalize_answer(answer)
        if _is_number(reference, one) and _is_number(answer, other):
            return one == other
        with self._free:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _Process(self.deadline_s)
            verdict = process.ask(reference, answer)
            if verdict is None:
                self._count("timeouts")
                process.stop()
            else:
                with self._lock:
                    self._idle.append(process)
        return bool(verdict)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1


class _Process:
    """One process of `math_process`."""

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        script = str(Path(__file__).with_name("math_process.py"))
        self._process = subprocess.Popen(  # -P: the script's folder, which has a math.py, is no place to import from
            [sys.executable, "-P", script, str(int(deadline_s) + 1), str(MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.stop = weakref.finalize(self, _end, self._process)
        if self._line(START_S) != "ready":
            self.stop()
            raise DeadlineError(
                f"MathEquality: the process that compares must start within {START_S:.0f} s: it ended with code "
                f"{self._process.returncode} (-9: it was too slow)."
            )

    def ask(self, reference: str, answer: str) -> bool | None:
        """The verdict; None where there is none in time, or the process died of the question."""
        try:
            self._process.stdin.write(json.dumps([reference, answer]) + "\n")
        except OSError:
            return None
        line = self._line(self.deadline_s)
        return json.loads(line) if line else None

    def _line(self, timeout_s: float) -> str:
        """The next line: one write of the process, so nothing is left in between in the buffer. Empty at its end."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if select.select([self._process.stdout], [], [], left)[0]:
                return self._process.stdout.readline().strip()
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not written yet has nobody to read it
            pipe.close()
    process.wait(timeout=10)


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
