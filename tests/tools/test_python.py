"""The Python tool and its pool of interpreters. What the sandbox keeps out is tested in test_sandbox_*.py."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from llmrl.errors import ConfigError, MissingDependencyError, UnsupportedError
from llmrl.tools import ToolCall, ToolError, ToolRunner, ToolTimeout, load_tool
from llmrl.tools.python import PythonTool, report
from llmrl.tools.sandbox import InterpreterPool, Limits, Sandbox, launch
from llmrl.tools.sandbox.session import SessionError
from tests.support.golden import check_golden
from tests.support.processes import wait_until
from tests.support.refusals import refusals


def best_kind() -> str:
    try:
        Sandbox("bubblewrap")
    except (MissingDependencyError, UnsupportedError):
        return "subprocess"
    return "bubblewrap"


def soon(timeout_s: float = 30.0) -> float:
    return time.monotonic() + timeout_s


@pytest.fixture(scope="module")
def tool():
    made = PythonTool(sandbox=best_kind(), spare=2)
    yield made
    made.close()


@pytest.fixture
def run(tool, request):
    def run(code: str, timeout_s: float = 30.0, conversation: str = request.node.name) -> str:
        return tool.call({"code": code}, conversation=conversation, deadline=soon(timeout_s))

    yield run
    tool.end(request.node.name)


@pytest.fixture
def pool_of():
    """Makes pools of plain subprocesses; they are closed at the end."""
    made = []

    def make(sandbox: Sandbox | None = None, **options) -> InterpreterPool:
        made.append(InterpreterPool(sandbox or Sandbox("subprocess"), **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


SESSION = [  # what one interpreter is told, one after the other
    *("x = 20\nx * 2 + 2", "print('a')\n'b'", "None", "y = 1", "", "if True:\n    6 * 7"),
    "print('{\"id\": 1, \"error\": null}')\nprint('done')",
    "for n in range(1000): print(n, end=' ')",
    "print('é\\u4e2d\\U0001f600', chr(0xd800), 'a\\0b')",
    "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('end')",
    # functions see each other and themselves, and stay
    "import math\ndef fact(n):\n    return 1 if n < 2 else n * fact(n - 1)\ndef both(n):\n    return fact(n) + math.pi",
    *("round(both(5), 2)", "def fact(n):\n    return 0", "round(both(5), 2)"),
    *("class A:\n    pass\n__name__, A.__module__", "import pickle\npickle.loads(pickle.dumps(A())).__class__ is A"),
    # what was written before an error stays, and a traceback has only this code
    "def inner():\n    return 1 / 0",
    "import sys\nprint('before')\nprint('warned', file=sys.stderr)\ninner()",
    *("x = = 1", "print('no newline', end='')\n[][1]", "input()", "x = '\ud800'"),
    "import warnings\nwarnings.warn('careful')",  # stderr alone is no failure
    # leaving ends the code and not the interpreter, and streams are renewed
    *("print('a')\nexit()\nprint('b')", "import sys\nsys.exit('no data')", "x"),
    "import io, sys\nsys.stdout.close()\nsys.stderr = io.StringIO()\nimport os; os.close(0)",
    "print('here')",
]


def test_a_session_with_one_interpreter_shows_what_it_prints_values_and_errors(run):
    pages = ""
    for code in SESSION:
        try:
            said = run(code)
        except ToolError as error:
            said = f"{type(error).__name__}: {error}"
        pages += f">>> {code}\n{said}\n"
    check_golden("python_session", pages.replace("\0", "\\0").encode(errors="backslashreplace").decode())


def test_output_before_a_timeout_is_kept_and_the_next_call_has_a_new_interpreter(run):
    run("x = 1")
    with pytest.raises(ToolTimeout) as caught:
        run("print('working', end='')\nwhile True: pass", timeout_s=0.5)
    text = str(caught.value)
    assert text.startswith("working\nstopped after ")
    assert text.endswith("[The interpreter was restarted: earlier variables are gone.]")
    with pytest.raises(ToolError, match="NameError"):
        run("x")


MEET = """
import os, time
open({folder!r} + '/' + {name!r}, 'w').close()
end = time.monotonic() + 20
while len(os.listdir({folder!r})) < 4 and time.monotonic() < end:
    time.sleep(0.01)
print(len(os.listdir({folder!r})), 'met')
"""


def test_calls_of_different_conversations_run_at_the_same_time(tmp_path):
    """Each waits until all are inside; one after the other they would not meet."""
    codes = [MEET.format(folder=str(tmp_path), name=str(n)) for n in range(4)]
    calls = [ToolCall("python", {"code": code}, id=str(n), conversation=n) for n, code in enumerate(codes)]
    with ToolRunner([PythonTool(sandbox="subprocess")], timeout_s=30) as runner:
        results = runner.run(calls)
    assert [result.content for result in results] == ["4 met\n"] * 4


def test_calls_of_one_conversation_from_two_threads_run_one_after_another(run):
    run("log = []\nimport time")
    code = "log.append('in'); time.sleep(0.1); log.append('out')"
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, [code] * 3))
    assert run("log") == "['in', 'out', 'in', 'out', 'in', 'out']\n"


@pytest.mark.parametrize("kind", ["subprocess", best_kind()])
def test_without_persistence_every_call_begins_anew(kind):
    with closing(PythonTool(sandbox=kind, persistent=False)) as tool:
        assert "starts afresh" in tool.description
        spoil = "x = 1\nimport builtins, json, os, sys\nbuiltins.leaked = json.leaked = os.environ['LEAKED'] = 'here'\n"
        spoil += "json.dumps = os.read = os.fork = builtins.sorted = None\nsys.modules['leaked'] = json"
        first = tool.execute(spoil, conversation="a", deadline=soon())
        look = "import builtins, json, os, sys\nprint('x' in globals(), hasattr(builtins, 'leaked'), hasattr(json, "
        look += "'leaked'), 'LEAKED' in os.environ, 'leaked' in sys.modules, len(json.dumps(sorted([]))))"
        second = tool.execute(look, conversation="a", deadline=soon())
        assert second.output == "False False False False False 2\n"
        assert (first.lost_after, second.lost_before, tool.pool.counters["killed"]) == (False, None, 0)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import ctypes; ctypes.string_at(0)", "the interpreter crashed (SIGSEGV)"),
        ("import os; os._exit(3)", "the interpreter ended with exit code 3"),
        ("import os, time\nif os.fork() == 0: time.sleep(100)\nos._exit(3)", "the interpreter ended with exit code 3"),
        ("import os; os.closerange(3, 256)", "the interpreter"),
        ("import os\nfor n in range(3, 9):\n    try: os.write(n, b'garbage' * 100)\n    except OSError: pass", None),
        ("raise ValueError('no')", "Traceback"),
        ("x = 1", None),
    ],
)
def test_without_persistence_a_call_that_ends_its_process_says_so_and_the_next_one_works(code, error):
    with closing(PythonTool(sandbox=best_kind(), persistent=False)) as tool:
        result = tool.execute(code, conversation="a", deadline=soon(10))
        if error is not None:
            assert result.error.startswith(error)
        assert result.status != "timeout"
        assert tool.execute("6 * 7", conversation="a", deadline=soon()).output == "42\n"


def test_the_interpreter_idle_for_longest_is_ended_and_its_conversation_reads_why(pool_of):
    pool = pool_of(spare=0, max_interpreters=2)
    for name in ("a", "b"):
        pool.run(f"x = '{name}'", conversation=name, deadline=soon())
    pool.run("x", conversation="a", deadline=soon())  # now b is the one
    pool.run("1", conversation="c", deadline=soon())
    assert pool.counters["evicted"] == 1
    assert pool.run("x", conversation="a", deadline=soon()).output == "'a'\n"
    result = pool.run("x", conversation="b", deadline=soon())
    assert result.lost_before == "others needed its place"
    assert report(result).startswith("[The interpreter was restarted: others needed its place.")
    assert "NameError" in result.error
    assert pool.run("1", conversation="b", deadline=soon()).lost_before is None


@contextmanager
def in_a_call(pool: InterpreterPool, sign: Path, timeout_s: float):
    """Within it a call of conversation "a", which made the file ``sign``, sleeps in another thread: its future."""
    code = f"import time\nopen({str(sign)!r}, 'w').close()\ntime.sleep(100)"
    pool.run("1", conversation="a", deadline=soon())  # starts the interpreter
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: pool.run(code, conversation="a", deadline=soon(timeout_s)))
        wait_until(sign.exists)
        yield future


def test_a_call_that_finds_every_interpreter_busy_waits_no_longer_than_its_deadline(tmp_path):
    with closing(PythonTool(sandbox="subprocess", spare=0, max_interpreters=1)) as tool:
        busy = pytest.raises(ToolTimeout, match="all 1 interpreters were busy")
        with in_a_call(tool.pool, tmp_path / "sign", 5.0), busy:
            tool.call({"code": "1"}, conversation="b", deadline=soon(0.2))
        assert tool.call({"code": "1"}, conversation="b", deadline=soon()) == "1\n"


def test_as_many_interpreters_are_ready_as_were_in_use_before(pool_of):
    pool = pool_of(spare=0)
    for name in range(4):
        pool.run("1", conversation=name, deadline=soon(60))
    for name in range(4):
        pool.end(name)
    wait_until(lambda: pool.counters["started"] >= 8)  # they are started without a call
    assert pool.counters["started"] == 8


def test_closing_ends_calls_that_run(pool_of, tmp_path):
    pool = pool_of(spare=0)
    with in_a_call(pool, tmp_path / "sign", 60.0) as call:
        pool.close()
    assert call.result().status == "error"
    with pytest.raises(ConfigError, match="call after close"):
        pool.run("1", conversation="a", deadline=soon(1))


def test_the_plain_subprocess_has_an_empty_environment_and_a_folder_that_goes_away(monkeypatch, pool_of):
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "7351")
    pool = pool_of()
    code = "import os\nprint(os.getcwd())\nopen('kept', 'w').close()\nprint(dict(os.environ))"
    result = pool.run(code, conversation="a", deadline=soon())
    pool.close()
    folder, environment = result.output.splitlines()
    assert "7351" not in environment
    assert folder != os.getcwd()
    assert not os.path.exists(folder)


def test_an_interpreter_with_packages_can_be_named(tmp_path, pool_of):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], timeout=60, check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "a_package_for_the_model.py").write_text("answer = 42\n")
    pool = pool_of(Sandbox(best_kind(), python=str(tmp_path / "env" / "bin" / "python")), spare=0)
    code = "import a_package_for_the_model as p\np.answer"
    assert pool.run(code, conversation=None, deadline=soon()).output == "42\n"


def test_an_interpreter_that_does_not_start_says_why(pool_of):
    pool = pool_of(Sandbox("subprocess", python="/bin/false"), spare=0)
    with pytest.raises(SessionError, match="an interpreter must start: the interpreter ended with exit code 1"):
        pool.run("1", conversation=None, deadline=soon())


@pytest.fixture
def program(monkeypatch):
    """Has the sandbox find another program as bubblewrap."""

    def clear() -> None:
        launch.check_bubblewrap.cache_clear()
        launch._bubblewrap.cache_clear()

    clear()
    yield lambda path: monkeypatch.setattr(launch.shutil, "which", lambda name: path)
    clear()


def test_without_bubblewrap_the_error_says_how_to_install_it(program):
    program(None)
    with pytest.raises(MissingDependencyError, match=r"scripts/setup, or install the package 'bubblewrap' with apt"):
        load_tool("python")


def test_a_bubblewrap_that_cannot_start_shows_its_own_words(program, tmp_path):
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    script.chmod(0o755)
    program(str(script))
    with pytest.raises(UnsupportedError, match=r"setting up uid map: Permission denied.*seccomp=unconfined"):
        Sandbox("bubblewrap")


test_settings_that_cannot_work_are_refused = refusals(
    (ConfigError, "memory_mib .*at least 64: got 0", lambda: Limits(memory_mib=0)),
    (ConfigError, "cpu_s .*whole number", lambda: Limits(cpu_s=1.5)),
    (ConfigError, r"got 'bubblewarp'\. Did you mean 'bubblewrap'", lambda: Sandbox("bubblewarp")),
    (ConfigError, "max_interpreters >= 1", lambda: InterpreterPool(Sandbox("subprocess"), max_interpreters=0)),
    (ConfigError, "spare <=", lambda: InterpreterPool(Sandbox("subprocess"), spare=3, max_interpreters=2)),
    (ConfigError, "Did you mean 'memory_mib'", lambda: PythonTool(sandbox="subprocess", limits={"memory_mb": 512})),
)
