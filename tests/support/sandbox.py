"""Interpreters in a bubblewrap sandbox, for tests that attack it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from llmrl.errors import MissingDependencyError, UnsupportedError
from llmrl.tools.sandbox import Execution, InterpreterPool, Limits, Sandbox

SECRET = "a-secret-of-the-host-7351"
Run = Callable[..., Execution]


def sandbox(**limits: int) -> Sandbox:
    """A bubblewrap sandbox; skips the test where there can be none."""
    try:
        return Sandbox("bubblewrap", Limits(**limits))
    except (MissingDependencyError, UnsupportedError) as error:
        pytest.skip(str(error))


def run_once(code: str, **limits: int) -> Execution:
    """Runs code in an interpreter of its own with these limits."""
    pool = InterpreterPool(sandbox(**limits), spare=0)
    try:
        return pool.run(code, conversation=None, deadline=time.monotonic() + 30)
    finally:
        pool.close()


def namespace_of(run: Run) -> str:
    """The process namespace of the interpreter that ``run`` uses."""
    return run("import os; print(os.readlink('/proc/self/ns/pid'))").output.strip()
