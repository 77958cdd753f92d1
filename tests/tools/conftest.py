"""A pool of sandboxed interpreters that the attacks share."""

import os
import time

import pytest

from llmrl.tools.sandbox import Execution, InterpreterPool
from tests.support.sandbox import SECRET, sandbox

# In the sandbox: prints "no" where a call is refused, else its result.
ATTEMPT = """
def attempt(call, *arguments):
    try:
        print('did', call(*arguments))
    except OSError as error:
        print('no')
"""


@pytest.fixture(scope="module")
def pool():
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    made = InterpreterPool(sandbox(), spare=2)
    yield made
    made.close()
    del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture
def run(pool, request):
    """Runs code in an interpreter of this test; that of another conversation must not notice."""
    deadline = time.monotonic() + 30
    pool.run(f"mine = {SECRET!r}", conversation="bystander", deadline=deadline)
    pool.run(ATTEMPT, conversation=request.node.name, deadline=deadline)

    def run(code: str, timeout_s: float = 20.0, conversation: str = request.node.name) -> Execution:
        return pool.run(code, conversation=conversation, deadline=time.monotonic() + timeout_s)

    yield run
    assert run("print(mine)", conversation="bystander").output == f"{SECRET}\n"
    pool.end(request.node.name)
