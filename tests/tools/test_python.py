"""The Python tool and its pool of interpreters. What the sandbox keeps out is tested in test_sandbox_attacks.py."""

import os
import subprocess
import sys
import threading
import time

import pytest

from llmrl.errors import ConfigError, MissingDependencyError, UnsupportedError
from llmrl.tools import ToolCall, ToolError, ToolRunner, ToolTimeout, load_tool
from llmrl.tools.python import PythonTool
from llmrl.tools.sandbox import InterpreterPool, Limits, Sandbox, launch
from llmrl.tools.sandbox.session import SessionError


def best_kind() -> str:
    try:
        Sandbox("bubblewrap")
    except (MissingDependencyError, UnsupportedError):
        return "subprocess"
    return "bubblewrap"


@pytest.fixture(scope="module")
def tool():
    made = PythonTool(sandbox=best_kind(), spare=2)
    yield made
    made.close()


@pytest.fixture
def run(tool, request):
    def run(code: str, timeout_s: float = 30.0, conversation: str = request.node.name) -> str:
        return tool.call({"code": code}, conversation=conversation, deadline=time.monotonic() + timeout_s)

    yield run
    tool.end(request.node.name)


def fails(run, code: str, timeout_s: float = 30.0) -> str:
    with pytest.raises(ToolError) as caught:
        run(code, timeout_s)
    return str(caught.value)


def test_the_value_of_a_last_expression_is_printed_as_at_a_prompt(run):
    assert run("x = 20\nx * 2 + 2") == "42\n"
    assert run("print('a')\n'b'") == "a\n'b'\n"
    assert run("None") == "(no output)"
    assert run("x = 1") == "(no output)"
    assert run("") == "(no output)"
    assert run("if True:\n    6 * 7") == "(no output)"


def test_functions_see_each_other_and_themselves_and_stay(run):
    run(
        "import math\ndef fact(n):\n    return 1 if n < 2 else n * fact(n - 1)\n"
        "def both(n):\n    return fact(n) + math.pi"
    )
    assert run("round(both(5), 2)") == "123.14\n"
    run("def fact(n):\n    return 0")
    assert run("round(both(5), 2)") == "3.14\n"
    assert run("class A:\n    pass\n__name__, A.__module__") == "('__main__', '__main__')\n"
    assert run("import pickle, dataclasses\npickle.loads(pickle.dumps(A())).__class__ is A") == "True\n"


def test_conversations_do_not_share_variables(run, tool):
    run("x = 'mine'")
    with pytest.raises(ToolError, match="NameError: name 'x' is not defined"):
        run("x", conversation="another one")
    tool.end("another one")
    assert run("x") == "'mine'\n"


def test_what_was_printed_before_an_error_is_kept_and_the_traceback_has_only_the_code(run):
    run("def inner():\n    return 1 / 0")
    assert fails(run, "import sys\nprint('before')\nprint('warned', file=sys.stderr)\ninner()") == (
        "before\nwarned\n"
        "Traceback (most recent call last):\n"
        '  File "<code 2>", line 4, in <module>\n'
        "    inner()\n"
        '  File "<code 1>", line 2, in inner\n'
        "    return 1 / 0\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero"
    )
    assert fails(run, "x = = 1").endswith("    x = = 1\n        ^\nSyntaxError: invalid syntax")
    assert fails(run, "print('no newline', end='')\n[][1]").startswith("no newline\nTraceback")


def test_writing_to_stderr_is_no_failure(run):
    assert run("import warnings\nwarnings.warn('careful')").count("careful") >= 1


def test_what_was_printed_before_a_timeout_is_kept_and_the_next_call_has_a_new_interpreter(run):
    run("x = 1")
    started = time.monotonic()
    with pytest.raises(ToolTimeout) as caught:
        run("print('working', end='')\nwhile True: pass", timeout_s=0.5)
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert text.startswith("working\nstopped after 0.5 s, its time was over\n")
    assert text.endswith("[The interpreter was restarted: earlier variables are gone.]")
    assert "NameError" in fails(run, "x")


def test_exit_ends_the_code_and_not_the_interpreter(run):
    run("x = 1")
    assert run("print('a')\nexit()\nprint('b')") == "a\n"
    assert fails(run, "import sys\nsys.exit('no data')") == "SystemExit: no data"
    assert run("x") == "1\n"


def test_an_end_marker_in_the_output_is_only_output(run):
    assert run("print('{\"id\": 1, \"error\": null}')\nprint('done')") == '{"id": 1, "error": null}\ndone\n'
    assert run("2") == "2\n"


def test_a_thousand_lines_arrive_whole_and_quickly(run):
    run("1")
    started = time.monotonic()
    assert run("for n in range(1000): print(n)") == "".join(f"{n}\n" for n in range(1000))
    assert time.monotonic() - started < 3


def test_replaced_and_closed_streams_are_renewed_for_the_next_call(run):
    run("import io, sys\nsys.stdout.close()\nsys.stderr = io.StringIO()\nimport os; os.close(0)")
    assert run("print('here')") == "here\n"


def test_there_is_nothing_to_read_from(run):
    assert "EOFError" in fails(run, "input()")


def test_any_text_can_be_printed(run):
    assert run("print('é\\u4e2d\\U0001f600', chr(0xd800), 'a\\0b')") == "é中😀 \\ud800 a\0b\n"
    assert "surrogates not allowed" in fails(run, "x = '\ud800'")


def test_a_forked_child_that_runs_to_the_end_answers_nothing(run):
    assert run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('end')").count("end") == 2
    assert run("1") == "1\n"


def test_the_argument_must_be_code(tool):
    with pytest.raises(ToolError, match="python: argument 'code' is missing"):
        tool.call({}, conversation=0, deadline=0)


def test_eight_blocks_of_a_second_run_at_the_same_time(tool):
    tool.pool.warm_up(8, time.monotonic() + 60)
    with ToolRunner([tool], timeout_s=20) as runner:
        runner.close = lambda: None  # the tool is used by other tests
        asked = [ToolCall("python", {"code": "import time\ntime.sleep(1)\nprint(1)"}, id=str(n)) for n in range(8)]
        started = time.monotonic()
        results = runner.run(asked)
    assert {result.content for result in results} == {"1\n"}
    assert time.monotonic() - started < 4  # one after another it would be 8


def test_calls_of_one_conversation_from_two_threads_run_one_after_another(run):
    run("log = []\nimport time")
    code = "log.append('in'); time.sleep(0.1); log.append('out')"
    threads = [threading.Thread(target=run, args=[code]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert run("log") == "['in', 'out', 'in', 'out', 'in', 'out']\n"


@pytest.mark.parametrize("kind", ["subprocess", best_kind()])
def test_without_persistence_every_call_begins_anew(kind):
    tool = PythonTool(sandbox=kind, persistent=False)
    try:
        assert "starts anew" in tool.description
        deadline = time.monotonic() + 30
        spoil = "x = 1\nimport builtins, json, os, sys\nbuiltins.leaked = json.leaked = os.environ['LEAKED'] = 'here'\n"
        spoil += "json.dumps = os.read = os.fork = builtins.sorted = None\nsys.modules['leaked'] = json"
        first = tool.execute(spoil, conversation="a", deadline=deadline)
        look = "import builtins, json, os, sys\nprint('x' in globals(), hasattr(builtins, 'leaked'), hasattr(json, "
        look += "'leaked'), 'LEAKED' in os.environ, 'leaked' in sys.modules, len(json.dumps(sorted([]))))"
        second = tool.execute(look, conversation="a", deadline=deadline)
        assert second.output == "False False False False False 2\n"
        assert (first.lost_after, second.lost_before, tool.pool.counters["killed"]) == (False, None, 0)
    finally:
        tool.close()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import ctypes; ctypes.string_at(0)", "the interpreter crashed (SIGSEGV)"),
        ("import os; os._exit(3)", "the interpreter ended with exit code 3"),
        ("import os, time\nif os.fork() == 0: time.sleep(100)\nos._exit(3)", "the interpreter ended with exit code 3"),
        ("import os; os.closerange(3, 256)", "the interpreter"),
        (
            "import os; [os.write(n, b'garbage' * 100) for n in range(3, 9) if os.path.exists(f'/proc/self/fd/{n}')]",
            None,
        ),
        ("raise ValueError('no')", "Traceback"),
        ("x = 1", None),
    ],
)
def test_without_persistence_a_call_that_ends_its_process_says_so_and_the_next_one_works(code, error):
    tool = PythonTool(sandbox=best_kind(), persistent=False)
    try:
        result = tool.execute(code, conversation="a", deadline=time.monotonic() + 10)
        if error is not None:
            assert result.error.startswith(error)
        assert result.status != "timeout"
        assert tool.execute("6 * 7", conversation="a", deadline=time.monotonic() + 30).output == "42\n"
    finally:
        tool.close()


def pool_of(**arguments) -> InterpreterPool:
    return InterpreterPool(Sandbox("subprocess"), **arguments)


def test_the_interpreter_idle_for_longest_gives_way_and_its_conversation_is_told():
    pool = pool_of(spare=0, max_interpreters=2)
    try:
        deadline = time.monotonic() + 60
        for name in ("a", "b"):
            pool.run(f"x = '{name}'", conversation=name, deadline=deadline)
        pool.run("x", conversation="a", deadline=deadline)  # now b is the one
        pool.run("1", conversation="c", deadline=deadline)
        assert pool.counters["evicted"] == 1
        assert pool.run("x", conversation="a", deadline=deadline).output == "'a'\n"
        result = pool.run("x", conversation="b", deadline=deadline)
        assert result.lost_before == "others needed its place"
        assert "NameError" in result.error
        assert pool.run("1", conversation="b", deadline=deadline).lost_before is None
    finally:
        pool.close()
    from llmrl.tools.python import report

    assert report(result).startswith(
        "[The interpreter was restarted: others needed its place. Earlier variables are gone.]\nTraceback"
    )


def test_a_call_that_finds_every_interpreter_busy_waits_no_longer_than_its_deadline():
    tool = PythonTool(sandbox="subprocess", spare=0, max_interpreters=1)
    try:
        inside = threading.Event()
        tool.execute("import time", conversation="a", deadline=time.monotonic() + 30)

        def occupy() -> None:
            inside.set()
            tool.execute("time.sleep(100)", conversation="a", deadline=time.monotonic() + 1)

        thread = threading.Thread(target=occupy)
        thread.start()
        assert inside.wait(10)
        time.sleep(0.1)
        with pytest.raises(ToolTimeout, match="all 1 interpreters were busy"):
            tool.call({"code": "1"}, conversation="b", deadline=time.monotonic() + 0.2)
        thread.join(timeout=10)
        assert tool.call({"code": "1"}, conversation="b", deadline=time.monotonic() + 30) == "1\n"
    finally:
        tool.close()


def test_as_many_interpreters_stand_ready_as_were_in_use_before():
    pool = pool_of(spare=0)
    try:
        deadline = time.monotonic() + 60
        for name in range(4):
            pool.run("1", conversation=name, deadline=deadline)
        for name in range(4):
            pool.end(name)
        pool.warm_up(4, deadline)  # they are started without a call
        assert pool.counters["started"] == 8
        started = time.perf_counter()
        pool.run("1", conversation="new", deadline=deadline)
        assert time.perf_counter() - started < 2
    finally:
        pool.close()


def test_closing_ends_calls_that_run():
    pool = pool_of(spare=0)
    results = []
    pool.run("import time", conversation="a", deadline=time.monotonic() + 30)
    inside = threading.Event()

    def call() -> None:
        inside.set()
        results.append(pool.run("time.sleep(100)", conversation="a", deadline=time.monotonic() + 60))

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(10)
    time.sleep(0.1)
    started = time.monotonic()
    pool.close()
    thread.join(timeout=10)
    assert time.monotonic() - started < 8
    assert results[0].status == "error"
    with pytest.raises(ConfigError, match="call after close"):
        pool.run("1", conversation="a", deadline=time.monotonic() + 1)


def test_the_plain_subprocess_has_an_empty_environment_and_a_folder_that_goes_away(monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "7351")
    pool = pool_of()
    result = pool.run(
        "import os\nprint(os.getcwd())\nopen('kept', 'w').close()\nprint(dict(os.environ))",
        conversation="a",
        deadline=time.monotonic() + 30,
    )
    pool.close()
    folder, environment = result.output.splitlines()
    assert "7351" not in environment
    assert not os.path.exists(folder)
    assert folder != os.getcwd()


def test_an_interpreter_with_packages_can_be_named(tmp_path):
    prefix = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], capture_output=True, timeout=60
    )
    assert prefix.returncode == 0
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "a_package_for_the_model.py").write_text("answer = 42\n")
    pool = InterpreterPool(Sandbox(best_kind(), python=str(tmp_path / "env" / "bin" / "python")), spare=0)
    try:
        code = "import a_package_for_the_model as p\np.answer"
        assert pool.run(code, conversation=None, deadline=time.monotonic() + 30).output == "42\n"
    finally:
        pool.close()


def test_an_interpreter_that_does_not_start_says_why():
    pool = InterpreterPool(Sandbox("subprocess", python="/bin/false"), spare=0)
    try:
        with pytest.raises(SessionError, match="an interpreter must start: the interpreter ended with exit code 1"):
            pool.run("1", conversation=None, deadline=time.monotonic() + 30)
    finally:
        pool.close()


def test_without_bubblewrap_the_error_says_how_to_install_it(monkeypatch):
    launch.check_bubblewrap.cache_clear()
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"scripts/setup, or install the package 'bubblewrap' with apt"):
        load_tool("python")
    launch.check_bubblewrap.cache_clear()


def test_a_bubblewrap_that_cannot_start_says_what_it_said(monkeypatch, tmp_path):
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(launch.shutil, "which", lambda name: str(script))
    launch.check_bubblewrap.cache_clear()
    launch._bubblewrap.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"setting up uid map: Permission denied.*seccomp=unconfined"):
            Sandbox("bubblewrap")
    finally:
        launch.check_bubblewrap.cache_clear()
        launch._bubblewrap.cache_clear()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(memory_mib=0), "memory_mib must be a whole number of at least 64: got 0"),
        (lambda: Limits(memory_mib=10), "memory_mib must be a whole number of at least 64"),
        (lambda: Limits(cpu_s=1.5), "cpu_s must be a whole number"),
        (lambda: Sandbox("bubblewarp"), r"got 'bubblewarp'\. Did you mean 'bubblewrap'\?"),
        (lambda: pool_of(max_interpreters=0), "max_interpreters >= 1: got spare=1, max_interpreters=0"),
        (lambda: pool_of(spare=3, max_interpreters=2), "spare <= max_interpreters"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_limits_are_given_by_name_as_a_recipe_writes_them():
    tool = PythonTool(sandbox="subprocess", limits={"output_kib": 1})
    try:
        text = tool.call({"code": "print('x' * 5000)"}, conversation=0, deadline=time.monotonic() + 30)
    finally:
        tool.close()
    assert text.count("x") <= 1024 + 10
    with pytest.raises(ConfigError, match=r"'memory_mb' must be one of .*Did you mean 'memory_mib'"):
        PythonTool(sandbox="subprocess", limits={"memory_mb": 512})
