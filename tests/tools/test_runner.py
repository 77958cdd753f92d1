import contextvars
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmrl.errors import ConfigError
from llmrl.tools import Tool, ToolCall, ToolError, ToolRunner, ToolTimeout, tool
from tests.support.processes import wait_until
from tests.support.refusals import refusals


@tool
def echo(text: str) -> str:
    """Says it again."""
    return text


class Gate(Tool):
    """Lets calls through when as many as it needs are inside at once."""

    name, description, parameters = "gate", "A gate.", {"type": "object", "properties": {}}

    def __init__(self, parties: int):
        self.barrier = threading.Barrier(parties)
        self.ended, self.closed = [], 0

    def call(self, arguments, *, conversation, deadline):
        self.barrier.wait(timeout=max(0.0, deadline - time.monotonic()))
        return "passed"

    def end(self, conversation):
        self.ended.append(conversation)

    def close(self):
        self.closed += 1


def calls(name: str, count: int, **arguments) -> list[ToolCall]:
    return [ToolCall(name, dict(arguments), id=f"call_{n}", conversation=n) for n in range(count)]


def test_calls_of_different_conversations_run_at_the_same_time_and_answers_keep_their_order():
    with ToolRunner([Gate(16), echo], timeout_s=20) as runner:
        mixed = [*calls("gate", 16), ToolCall("echo", {"text": "hi"}, id="x", conversation=99)]
        results = runner.run(mixed)
    assert [result.call for result in results] == mixed
    assert [result.content for result in results] == ["passed"] * 16 + ["hi"]
    assert (runner.counters["calls"], runner.counters["ok"]) == (17, 17)


def test_calls_of_one_conversation_run_in_their_order_also_when_one_fails():
    seen = []

    @tool
    def step(number: int) -> str:
        """A step."""
        seen.append(number)
        if number == 2:
            raise ValueError("no")
        return str(number)

    with ToolRunner([step]) as runner:
        results = runner.run([ToolCall("step", {"number": n}, id=str(n), conversation="a") for n in range(5)])
    assert seen == [0, 1, 2, 3, 4]
    assert [result.status for result in results] == ["ok", "ok", "error", "ok", "ok"]


def test_no_more_calls_run_at_once_than_allowed_over_all_threads():
    inside, most = [], []

    @tool
    def busy() -> str:
        """Is busy."""
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return ""

    with ToolRunner([busy], max_concurrency=3) as runner, ThreadPoolExecutor(3) as threads:
        list(threads.map(runner.run, [calls("busy", 6)] * 3))
    assert runner.counters["ok"] == 18
    assert max(most) <= 3


def test_faults_of_a_call_are_answers_to_the_model():
    @tool
    def fail(how: str) -> str:
        """Fails."""
        if how == "exit":
            sys.exit(3)
        if how == "told":
            raise ToolError("fail: there is nothing here.")
        if how == "late":
            raise ToolTimeout("fail: gave up.")
        raise {"key": KeyError("x"), "empty": ValueError(), "os": OSError(2, "gone")}[how]

    faults = ("exit", "told", "late", "key", "empty", "os")
    asked = [ToolCall("fail", {"how": how}, id=how, conversation=how) for how in faults]
    asked += [ToolCall("fial", {}, id="1"), ToolCall("fail", None, id="2"), ToolCall("fail", [1], id="3")]
    asked += [ToolCall("", None, id="4", error="The call is not JSON.")]
    with ToolRunner([fail, echo]) as runner:
        results = runner.run(asked)
    assert [(result.status, result.content) for result in results] == [
        ("error", "SystemExit: 3"),
        ("error", "fail: there is nothing here."),
        ("timeout", "fail: gave up."),
        ("error", "KeyError: 'x'"),
        ("error", "ValueError"),
        ("error", "FileNotFoundError: [Errno 2] gone"),
        ("unknown", "'fial' is not a tool. Did you mean 'fail'? Tools: fail, echo."),
        ("error", "fail: argument 'how' is missing. Expected: how (string)."),
        ("malformed", "fail: the arguments must be a JSON object: got a list."),
        ("malformed", "The call is not JSON."),
    ]
    counts = {"calls": 10, "ok": 0, "error": 6, "timeout": 1, "malformed": 2, "unknown": 1, "cut": 0, "left_behind": 0}
    assert runner.counters == counts


def test_a_function_that_hangs_is_left_behind_at_its_deadline_and_the_next_call_runs():
    release = threading.Event()

    @tool(timeout_s=1.0)
    def hang(first: bool) -> str:
        """Hangs."""
        if first:
            release.wait(60)
        return "done"

    with ToolRunner([hang]) as runner:
        asked = [ToolCall("hang", {"first": first}, id="", conversation="a") for first in (True, False)]
        late, done = runner.run(asked)
        assert (late.status, late.content) == ("timeout", "hang: no result within 1 s; the call was abandoned.")
        assert (done.status, done.content) == ("ok", "done")
        assert runner.counters["left_behind"] == 1
        release.set()


def test_a_call_that_gets_no_slot_says_which_call_holds_it(monkeypatch):
    monkeypatch.setattr("llmrl.tools.runner._SLOT_S", 0.1)
    entered, release = threading.Event(), threading.Event()

    @tool
    def hold() -> str:
        """Holds its slot."""
        entered.set()
        return str(release.wait(60))

    with ToolRunner([hold, echo], max_concurrency=1, timeout_s=60) as runner:
        holder = threading.Thread(target=runner.run, args=[calls("hold", 1)])
        holder.start()
        assert entered.wait(30)
        (late,) = runner.run(calls("echo", 1, text="hi"))
        release.set()
        holder.join(timeout=30)
        assert late.status == "timeout"
        assert late.content.endswith("all 1 calls at a time were taken, the longest by 'hold'.")
        assert runner.run(calls("echo", 1, text="hi"))[0].content == "hi"


def test_a_tool_that_keeps_hanging_is_refused_until_its_calls_end():
    release = threading.Event()

    @tool(timeout_s=0.05)
    def hang() -> str:
        """Hangs."""
        release.wait(60)
        return "done"

    with ToolRunner([hang]) as runner:
        assert {result.status for result in runner.run(calls("hang", 16))} == {"timeout"}
        (refused,) = runner.run(calls("hang", 1))
        assert refused.content == "hang: cannot be called now: 16 earlier calls have still not ended."
        release.set()
        wait_until(lambda: runner.run(calls("hang", 1))[0].status == "ok")


def test_what_a_tool_says_about_its_own_timeout_reaches_the_model():
    class Slow(Tool):
        name, description, parameters = "slow", "Slow.", {"type": "object", "properties": {}}
        timeout_s = 0.05

        def call(self, arguments, *, conversation, deadline):
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.05)
            raise ToolTimeout("half of it")

    with ToolRunner([Slow()]) as runner:
        (result,) = runner.run(calls("slow", 1))
    assert (result.status, result.content) == ("timeout", "half of it")


def test_ended_conversations_and_closing_reach_every_tool_even_if_one_fails(caplog):
    class Bad(Gate):
        name = "bad"

        def end(self, conversation):
            raise RuntimeError("cannot end")

    gate = Gate(1)
    runner = ToolRunner([Bad(1), gate])
    runner.end(["a", "b"])
    runner.close()
    runner.close()
    assert (gate.ended, gate.closed) == (["a", "b"], 1)
    assert "'bad': end() failed" in caplog.text
    with pytest.raises(ConfigError, match="call after close"):
        runner.run([])


test_settings_that_cannot_work_are_refused = refusals(
    (ConfigError, "name of its own: got 'echo' twice", lambda: ToolRunner([echo, echo])),
    (ConfigError, "timeout_s must be positive: got 0", lambda: ToolRunner([], timeout_s=0)),
    (ConfigError, "max_result_chars must be at least 100", lambda: ToolRunner([], max_result_chars=10)),
    (ConfigError, "max_concurrency must be at least 1", lambda: ToolRunner([], max_concurrency=0)),
)


def test_a_process_can_end_while_a_call_hangs():
    script = """
import time
from llmrl.tools import ToolCall, ToolRunner, tool
@tool(timeout_s=0.1)
def hang() -> str:
    "Hangs."
    time.sleep(1000)
print(ToolRunner([hang]).run([ToolCall("hang", {}, id="x")])[0].status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr, done.returncode) == ("timeout\n", "", 0)


def test_long_results_keep_head_and_tail_and_the_notice_counts_what_was_cut():
    text = "a" * 10_000 + "b" * 10_000
    with ToolRunner([echo], max_result_chars=1000) as runner:
        (result,) = runner.run([ToolCall("echo", {"text": text}, id="x")])
        head, notice, tail = result.content.split("\n")
        assert notice == f"[... {result.cut:,} characters cut ...]"
        assert head == "a" * len(head)
        assert tail == "b" * len(tail)
        assert len(head) + len(tail) + result.cut == 20_000
        assert 990 <= len(result.content) <= 1000
        assert runner.counters["cut"] == 1
        (result,) = runner.run([ToolCall("echo", {"text": "x" * 1000}, id="x")])
        assert (len(result.content), result.cut) == (1000, 0)


def test_threads_are_used_again_but_what_a_call_sets_in_its_context_ends_with_it():
    variable = contextvars.ContextVar("variable", default="nothing")
    threads = []

    @tool
    def keep(value: str) -> str:
        """Keeps it."""
        threads.append(threading.get_ident())
        before = variable.get()
        variable.set(value)
        return before

    with ToolRunner([keep]) as runner:
        asked = [ToolCall("keep", {"value": str(n)}, id=str(n), conversation=0) for n in range(4)]
        assert [result.content for result in runner.run(asked)] == ["nothing"] * 4
        assert len(set(threads)) == 1
    wait_until(lambda: threads[0] not in {thread.ident for thread in threading.enumerate()})


def test_a_runner_that_was_used_runs_calls_in_a_forked_process_too():
    script = """
import os
from llmrl.tools import ToolCall, ToolRunner, load_tool
runner = ToolRunner([load_tool("calculator")])
calls = [ToolCall("calculator", {"expression": "6 * 7"}, id=str(n)) for n in range(8)]
assert {result.content for result in runner.run(calls)} == {"42"}
child = os.fork()
assert {result.content for result in runner.run(calls)} == {"42"}
if child:
    assert os.waitpid(child, 0)[1] == 0
"""  # the child ends as an interpreter does, which stops the timer of `watch_lock` once more
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
