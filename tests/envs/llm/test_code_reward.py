"""Code is scored by the tests that it passes, in a sandbox."""

import json
import shutil
from contextlib import closing

import pytest

from llmrl.envs.llm.answers import code_block
from llmrl.envs.llm.rewards import CodeReward
from llmrl.errors import ConfigError, DataError
from tests.support.refusals import refusals


@pytest.fixture(scope="module")
def reward():
    # Which sandbox is the tool's concern and tested there; these run wherever a process can be started.
    reward = CodeReward(sandbox="bubblewrap" if shutil.which("bwrap") else "subprocess", timeout_s=5.0, concurrency=4)
    yield reward
    reward.close()


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


DOUBLE = fenced("print(int(input()) * 2)")
IO = [{"input": "2\n", "output": "4\n"}, {"input": "-3", "output": "-6"}]
ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]


@pytest.mark.parametrize(
    ("completion", "tests", "score"),
    [
        (DOUBLE, IO, 1.0),
        (DOUBLE, json.dumps(IO), 1.0),
        (DOUBLE, {"inputs": ["2", "5"], "outputs": ["4", "11"]}, 0.5),
        (fenced("print(4)"), IO, 0.5),
        (fenced("print(int(input()) * 2)\nprint('done')"), IO, 0.0),
        (fenced("import sys\nprint('debug', file=sys.stderr)\nprint(int(input()) * 2)\nsys.exit(0)"), IO, 1.0),
        (fenced("print('4   \\n\\n')"), IO[:1], 1.0),
        (fenced("print(' 4')"), IO[:1], 0.0),
        (fenced("if __name__ == '__main__':\n    print(4)"), IO[:1], 1.0),
        (fenced("print("), IO, 0.0),
        ("print(4)", IO[:1], 0.0),
        ("<think>" + DOUBLE + "</think>I give up.", IO, 0.0),
        (fenced("print(1)") + DOUBLE + "```text\n4\n```", IO, 1.0),
        (fenced(ADD), ASSERTS, 1.0),
        (fenced(ADD), "assert add(1, 2) == 3\nassert add(2, 2) == 4", 1.0),
        (fenced("def add(a, b):\n    return int(a) + int(b)"), ASSERTS, pytest.approx(2 / 3)),
        (fenced("import os, sys\nsys.exit(0)"), ASSERTS, 0.0),
        (fenced("import os\nos._exit(0)"), ASSERTS[:1], 0.0),
        (fenced("print('x' * 10)\n" + ADD + "\n'''tricky \"\"\" \\\\ quotes'''"), ASSERTS, 1.0),
    ],
)
def test_the_score_is_the_fraction_of_tests_that_pass(reward, completion, tests, score):
    assert reward(completion, tests) == score


def test_all_or_nothing_stops_at_the_first_failure():
    with closing(CodeReward(sandbox="subprocess", mode="all", concurrency=1)) as reward:
        assert reward(DOUBLE, IO[:1]) == 1.0
        assert reward(fenced("print(5)"), [*IO, {"input": "", "output": "5"}]) == 0.0
        assert reward._tool.pool.counters["killed"] == 2


def test_a_case_that_takes_too_long_fails_alone():
    code = fenced("n = int(input())\nwhile n == 0:\n    pass\nprint(n)")
    with closing(CodeReward(sandbox="subprocess", timeout_s=1.0, concurrency=2)) as reward:
        assert reward(code, [{"input": "0", "output": "0"}, {"input": "1", "output": "1"}]) == 0.5


def test_cases_do_not_see_what_others_did(reward):
    code = fenced("import builtins\nprint(getattr(builtins, 'seen', 0))\nbuiltins.seen = 1")
    assert reward(code, [{"input": "", "output": "0"}] * 4) == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "at least one case"),
        (None, "at least one case"),
        ([{"input": "1"}], "input and output"),
        ({"inputs": ["1"], "outputs": []}, "equally many"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_not_a_zero(reward, tests, message):
    with pytest.raises(DataError, match=message):
        reward(DOUBLE, tests)


test_settings_that_cannot_work_are_refused = refusals(
    (ConfigError, "mode must be", lambda: CodeReward(mode="some", sandbox="subprocess")),
    (ConfigError, "timeout_s .*positive", lambda: CodeReward(timeout_s=0, sandbox="subprocess")),
)


WITH_CODE = {"```python\na\n```": "a\n", "```py\na\n```\n```Python\nb\n```": "b\n", "```\na\n```": "a\n"}
WITH_CODE |= {"  ```python\n  a\n  ```": "  a\n", "```python\ns = '```'\n```": "s = '```'\n"}
WITHOUT_CODE = ["```javascript\na\n```", "```python\na", "<think>```python\na\n```</think>", "no code"]


@pytest.mark.parametrize(("text", "code"), [*WITH_CODE.items(), *((text, None) for text in WITHOUT_CODE)])
def test_the_last_python_block_outside_thinking_is_the_code(text, code):
    assert code_block(text) == code
