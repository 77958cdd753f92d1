"""Tools of MCP servers, with real servers of the official package as processes of their own."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tensordict import TensorDict

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.transforms import MCPToolTransform
from llmrl.errors import ConfigError, DeadlineError
from llmrl.testing import ScriptedPolicy
from llmrl.tools import ToolCall, ToolError, ToolTimeout, load_tool
from llmrl.tools.mcp_client import MCPServers, MCPTool
from llmrl.tools.mcp_stdio import _line
from llmrl.tools.runner import ToolRunner
from tests.support.processes import is_running, wait_until
from tests.support.refusals import refusals

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the package mcp: llmrl[mcp]"),
]

SERVER = [str(Path(__file__).with_name("mcp_server.py"))]
STDIO = {"command": sys.executable, "args": SERVER}
WAIT_S = 30.0


def script(code: str) -> dict[str, object]:
    return {"command": sys.executable, "args": ["-ISc", f"import sys, time; {code}"]}


def soon() -> float:
    return time.monotonic() + WAIT_S


@pytest.fixture(scope="module")
def things():
    with MCPServers({"things": STDIO}, start_timeout_s=WAIT_S) as servers:
        yield {tool.name: tool for tool in servers.tools}


def call(tool, *, deadline=None, **arguments):
    return tool.call(arguments, conversation=0, deadline=soon() if deadline is None else deadline)


def test_every_tool_of_a_server_is_a_tool_with_its_schema(things):
    assert set(things) == {"add", "environment", "fail", "hang", "die", "meet"}
    assert things["add"].description == "The sum of two numbers."
    assert things["add"].parameters["properties"]["a"]["type"] == "integer"
    assert things["add"].schema()["function"]["name"] == "add"


def test_failures_and_deadlines_are_errors_of_the_call_and_the_server_goes_on(things):
    with pytest.raises(ToolError, match="b"):
        call(things["add"], a=1)
    with pytest.raises(ToolError, match="fail"):
        call(things["fail"], reason="rain")
    with pytest.raises(ToolTimeout, match="did not answer in time"):
        call(things["hang"], deadline=time.monotonic() + 0.2)
    assert call(things["add"], a=2, b=2) == "4"


def test_calls_are_sent_side_by_side(things, tmp_path):
    """Each waits until all are inside; one after the other they would not meet."""
    runner = ToolRunner(list(things.values()), timeout_s=WAIT_S)
    arguments = [{"folder": str(tmp_path), "name": str(n), "others": 4} for n in range(4)]
    results = runner.run([ToolCall("meet", given, str(n), n) for n, given in enumerate(arguments)])
    assert [result.content for result in results] == ["4 met"] * 4


def test_a_server_gets_no_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("LLMRL_SECRET_OF_THE_TEST", "1")
    with MCPServers({"things": STDIO}, start_timeout_s=WAIT_S) as servers:
        names = call(next(tool for tool in servers.tools if tool.name == "environment"))
    assert "PATH" in names.split()
    assert "SECRET" not in names


def test_a_server_that_dies_fails_the_call_and_is_started_again_a_few_times():
    with MCPServers({"things": STDIO}, start_timeout_s=WAIT_S) as servers:
        tools = {tool.name: tool for tool in servers.tools}
        with pytest.raises(ToolError, match="'things' was lost during the call"):
            call(tools["die"])
        assert call(tools["add"], a=1, b=2) == "3", "it was started again"
        for _ in range(2):
            with pytest.raises(ToolError, match="was lost"):
                call(tools["die"])
        with pytest.raises(ToolError, match="cannot be called any more"):
            call(tools["add"], a=1, b=2)


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        (script("sys.exit('cannot read the settings')"), ConfigError, "cannot read the settings"),
        (script("print('hangs', file=sys.stderr, flush=True); time.sleep(3600)"), DeadlineError, "hangs"),
        ({"command": "no-such-command"}, ConfigError, "no-such-command"),
        ("http://127.0.0.1:9/mcp", ConfigError, "ConnectError"),
    ],
)
def test_a_server_that_does_not_start_says_why_in_time(settings, kind, says):
    before = set(threading.enumerate())
    with pytest.raises(kind, match=says):
        MCPServers({"things": settings}, start_timeout_s=5.0)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "mcp"]


test_settings_that_cannot_be_used_are_refused = refusals(
    (ConfigError, "at least one", lambda: MCPServers({})),
    (ConfigError, "either a command or a url", lambda: MCPServers({"a": {"args": []}})),
    (ConfigError, "Did you mean 'args'", lambda: MCPServers({"a": {"command": "x", "arg": []}})),
    (ConfigError, "Did you mean 'headers'", lambda: MCPServers({"a": {"url": "http://x", "header": {}}})),
    (ConfigError, "unusable 'args'", lambda: MCPServers({"a": {"command": "x", "args": "y"}})),
    (ConfigError, "a mapping, a command line or a URL", lambda: MCPServers({"a": 5})),
    (ConfigError, "cannot be read", lambda: MCPServers({"a": "my-server --name 'x"})),
)


def test_closing_ends_the_server():
    servers = MCPServers({"things": STDIO}, start_timeout_s=WAIT_S)
    connection = servers._connections[0]
    servers.close()
    servers.close()
    assert connection._task is None
    with pytest.raises(Exception, match="is closed"):
        call(servers.tools[0], a=1, b=2)


def test_a_single_tool_can_be_named_in_a_configuration():
    with closing(load_tool("mcp", {"server": STDIO, "tool": "add"})) as tool:
        assert call(tool, a=1, b=2) == "3"
    with pytest.raises(ConfigError, match="Did you mean 'add'"):
        MCPTool(STDIO, "adds")


def test_streamable_http_servers_are_called_and_found_again():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    server = serve(port)
    try:
        settings = {"a": url, "b": {"url": url, "headers": {"X-Who": "b"}}}
        with MCPServers(settings, start_timeout_s=WAIT_S) as servers:
            tools = {tool.name: tool for tool in servers.tools}
            assert {"a_add", "b_add"} <= set(tools), "names that two servers share"
            assert call(tools["a_add"], a=1, b=2) == call(tools["b_add"], a=1, b=2) == "3"
            with pytest.raises(ToolError, match="was lost"):
                call(tools["b_die"])
            server.wait(WAIT_S)
            with pytest.raises(ToolError, match="was lost"):
                call(tools["a_add"], a=1, b=2)
            server = serve(port)
            assert call(tools["a_add"], a=1, b=2) == call(tools["b_add"], a=1, b=2) == "3"
    finally:
        server.kill()
        server.wait(WAIT_S)


def serve(port: int) -> subprocess.Popen[bytes]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, *SERVER, "http", str(port)], **quiet)

    def listens() -> bool:
        assert server.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    return server


def test_the_transform_runs_the_documented_tags_and_patterns():
    def turn(transform, *answers):
        env = ChatEnv(batch_size=[len(answers)]).append_transform(transform)
        try:
            td = env.reset(TensorDict(query="?", batch_size=[len(answers)]))
            assert "tools" not in td["history"].prompt.to_chats()[0][0]  # the tags need no declaration by a template
            td = env.step(ScriptedPolicy(list(answers))(td))
            return [chat[-1] for chat in td["next", "history"].prompt.to_chats()]
        finally:
            env.close()

    tagged = MCPToolTransform({"things": STDIO}, timeout=WAIT_S)
    assert '"name": "add"' in tagged.instructions()
    right, wrong = turn(tagged, '<tool>add\n{"a": 1, "b": 2}</tool>', "<tool>ad\n{}</tool>")
    assert right == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_0_0_0"}
    assert "Did you mean 'add'" in wrong["content"]
    pattern = MCPToolTransform({"things": STDIO}, r"CALL (\w+) (\{.*?\})", "user", WAIT_S)
    (message,) = turn(pattern, 'CALL add {"a": 2, "b": 2}')
    assert (message["role"], message["content"]) == ("user", "4")


HOSTILE = {"command": sys.executable, "args": ["-IS", str(Path(__file__).with_name("mcp_hostile_server.py"))]}


@pytest.fixture(scope="module")
def hostile():
    with MCPServers({"hostile": HOSTILE}, start_timeout_s=WAIT_S) as servers:
        yield {tool.name: tool for tool in servers.tools}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("huge", "longer than 16 MiB"),
        ("null", "its result is None"),
        ("refuse", "the disk is full"),
        ("odd_error", "its error is 'out of order'"),
        ("no_content", "content"),
    ],
)
def test_an_answer_that_is_not_a_result_is_an_error_of_its_call_and_the_server_goes_on(hostile, name, says):
    """Regression: the call timed out, or the server was said to have ended."""
    connection = hostile["echo"]._connection
    before = connection._server
    with pytest.raises(ToolError, match=says):
        call(hostile[name])
    assert call(hostile["echo"]) == "here"
    assert connection._server is before, "it was not started again"


def test_a_result_with_bytes_that_are_not_text_is_shown_with_replacement_characters(hostile):
    assert call(hostile["binary"]) == "PNG\ufffd\ufffd"
    assert call(hostile["echo"]) == "here"


@pytest.mark.parametrize("name", ["silent", "endless"])
def test_a_server_that_answers_nothing_any_more_is_started_again(monkeypatch, name):
    monkeypatch.setattr("llmrl.tools.mcp_client._PING_S", 0.3)
    with MCPServers({"hostile": HOSTILE}, start_timeout_s=WAIT_S) as servers:
        tools = {tool.name: tool for tool in servers.tools}
        connection = tools["echo"]._connection
        before, task = connection._server, connection._task
        with pytest.raises(ToolTimeout):
            call(tools[name], deadline=time.monotonic() + 0.5)
        servers._loop.run(asyncio.wait([task], timeout=WAIT_S), soon())
        assert not before.is_open
        assert call(tools["echo"]) == "here"
        assert connection._server is not before


def test_a_line_without_an_end_is_read_in_bounded_memory():
    """Regression: 1.6 GB."""

    async def read():
        reader = asyncio.StreamReader(limit=1 << 16)
        peak = 0
        lines = asyncio.create_task(_lines(reader))
        for _ in range(400):
            reader.feed_data(b"x" * (1 << 15))
            await asyncio.sleep(0)
            peak = max(peak, len(reader._buffer))
        reader.feed_data(b"\nnext\n")
        reader.feed_eof()
        return peak, await lines

    async def _lines(reader):
        found = []
        while (line := await _line(reader)) is not None:
            found.append(line)
        return found

    peak, lines = asyncio.run(read())
    assert lines == [b"x" * 300, b"next\n"]
    assert peak <= 1 << 18


def test_the_children_of_a_server_that_closed_its_output_end_with_it():
    with MCPServers({"hostile": HOSTILE}, start_timeout_s=WAIT_S) as servers:
        tools = {tool.name: tool for tool in servers.tools}
        child = int(call(tools["orphan"]))
        wait_until(lambda: not is_running(child))


def test_a_server_that_hangs_when_it_is_started_again_fails_the_call_in_time(tmp_path):
    code = (
        f"from pathlib import Path; first = Path({str(tmp_path / 'first')!r})\n"
        "if first.exists(): time.sleep(3600)\n"
        f"first.touch(); sys.argv[0] = {HOSTILE['args'][1]!r}; exec(open(sys.argv[0]).read())"
    )
    settings = {"command": sys.executable, "args": ["-ISc", f"import sys, time\n{code}"]}
    with MCPServers({"hostile": settings}, start_timeout_s=5.0) as servers:
        tools = {tool.name: tool for tool in servers.tools}
        os.kill(servers._connections[0]._server.pid, signal.SIGKILL)
        with pytest.raises(ToolError, match="was lost"):
            call(tools["echo"])
        with pytest.raises(ToolError, match="could not be started again: TimeoutError"):
            call(tools["echo"])
