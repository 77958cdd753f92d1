"""`CodeReward`: runs the code of a response against the tests of its row, in the sandbox of the Python tool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from llmrl.envs.llm.answers import code_block
from llmrl.errors import ConfigError, DataError, check_choice
from llmrl.strict_json import parse_json
from llmrl.tools.python import PythonTool
from llmrl.tools.sandbox import Limits
from llmrl.tools.sandbox.launch import Kind

START_S = 600.0  # limit for obtaining an interpreter, which may wait for other cases

# The response's code is inserted as a string literal and run by exec, so it cannot alter the surrounding program text.
_STDIN = """
import io, os, sys
sys.stdin = io.TextIOWrapper(io.BytesIO({stdin}.encode()), encoding="utf-8")
sys.stderr = open(os.devnull, "w")
try:
    exec(compile({code}, "solution.py", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
"""
_ASSERT = """
def run(code, test):
    scope = {{"__name__": "solution"}}
    exec(compile(code, "solution.py", "exec"), scope)
    exec(compile(test, "test.py", "exec"), scope)
run({code}, {test})
print("\\n" + {passed})
"""


class CodeReward:
    """Runs the last Python block of a response against test cases, each in its own sandboxed interpreter.

    Reads   the column ``tests``: a list of cases, or the same as JSON. A case is Python text that must run without an
            error after the code, as ``assert add(1, 2) == 3``, or ``{"input": ..., "output": ...}``: the code's stdin
            and expected stdout, ignoring trailing white space. ``{"inputs": [...], "outputs": [...]}`` lists the latter
    Returns the fraction of the cases that passed, or with ``mode="all"`` 1.0 if all did, else 0.0; 0.0 without code. A
            case fails if the code raises, takes longer than ``timeout_s`` seconds or writes too much
    Raises  at a call, DataError for a row without cases; SessionError, DeadlineError if no interpreter is available,
            which does not mean that the code is wrong (the row has no reward in both cases); at construction,
            MissingDependencyError or UnsupportedError if the sandbox is not available

    ``concurrency`` cases run at a time over all rows. Text cases run in the same interpreter as the code, so malicious
    code can fake a pass. Outputs of the input/output cases are compared outside.

    >>> reward = CodeReward(sandbox="subprocess")
    >>> tests = [{"input": "2", "output": "4"}, {"input": "3", "output": "7"}]
    >>> reward("```python\\nprint(int(input()) * 2)\\n```", tests)
    0.5
    >>> reward.close()
    """

    name = "code"

    def __init__(
        self,
        *,
        mode: Literal["fraction", "all"] = "fraction",
        timeout_s: float = 5.0,
        concurrency: int = 8,
        sandbox: Kind = "bubblewrap",
        limits: Limits | Mapping[str, int] | None = None,
    ):
        check_choice("CodeReward", "mode", mode, ("fraction", "all"))
        if timeout_s <= 0 or concurrency < 1:
            raise ConfigError(
                f"CodeReward: timeout_s must be positive and concurrency at least 1: got {timeout_s} and {concurrency}."
            )
        self.mode = mode
        self.timeout_s = timeout_s
        self.concurrency = concurrency  # rows at a time; their cases share the same number of interpreters
        if not isinstance(limits, Limits):
            limits = Limits(**{"output_kib": 1024, **(limits or {})})
        self._tool = PythonTool(sandbox=sandbox, limits=limits, spare=1, max_interpreters=concurrency)

    def __call__(self, completion: str, tests: Any) -> float:
        cases = _cases(tests)
        code = code_block(completion)
        if code is None:
            return 0.0
        if self.mode == "all":
            return float(all(self._passes(code, case) for case in cases))
        with ThreadPoolExecutor(max_workers=min(self.concurrency, len(cases))) as pool:
            passed = list(pool.map(lambda case: self._passes(code, case), cases))
        return sum(passed) / len(cases)

    def close(self) -> None:
        """Ends the interpreters."""
        self._tool.close()

    def _passes(self, code: str, case: str | tuple[str, str]) -> bool:
        if isinstance(case, str):
            mark = secrets.token_hex(16)  # printed at the end: missing if the code ends the program early
            program = _ASSERT.format(code=repr(code), test=repr(case), passed=repr(mark))
            ok, output = self._run(program)
            return ok and output.rstrip().endswith(mark)
        stdin, expected = case
        ok, output = self._run(_STDIN.format(stdin=repr(stdin), code=repr(code)))
        # Compared here, outside of the interpreter, so the code never sees the expected output.
        return ok and _lines(output) == _lines(expected)

    def _run(self, program: str) -> tuple[bool, str]:
        """(True if the program finished, its output). The time to get an interpreter does not count."""
        # Each case gets a new interpreter, so that no state leaks between cases.
        conversation = object()
        try:
            self._tool.execute("", conversation=conversation, deadline=time.monotonic() + START_S)
            deadline = time.monotonic() + self.timeout_s
            result = self._tool.execute(program, conversation=conversation, deadline=deadline)
        finally:
            self._tool.end(conversation)
        return result.status == "ok", result.output


def _cases(tests: Any) -> list[str | tuple[str, str]]:
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError:
            tests = [tests]  # a single text case
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise DataError(f"CodeReward: tests must have equally many inputs and outputs: got {tests!r:.120}.")
        tests = [{"input": given, "output": due} for given, due in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, Sequence) or not tests:
        raise DataError(f"CodeReward: tests must be a list with at least one case: got {tests!r:.120}.")
    cases: list[str | tuple[str, str]] = []
    for case in tests:
        if not isinstance(case, str) and not (isinstance(case, Mapping) and "output" in case):
            raise DataError(f"CodeReward: a test case must be a text, or have input and output: got {case!r:.120}.")
        cases.append(case if isinstance(case, str) else (str(case.get("input") or ""), str(case["output"])))
    return cases


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
