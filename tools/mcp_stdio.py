"""The process of an MCP server and its pipes, as a transport of the ``mcp`` package.

The package's own transport reads lines of any length, waits forever after an answer that breaks the protocol, and
leaves behind the children of a server that exited by itself. Here lines have a maximum length, a broken answer becomes
the error of its call, and the server's whole process group ends with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from llmrl.concurrency.processes import signal_group
from llmrl.optional import require
from llmrl.strict_json import JSONError, parse_json

MAX_LINE = 16 << 20  # bytes of one message
_MAX_STDERR = 2000  # bytes that are kept
_GRACE_S = 2.0  # for the server to exit once stdin is closed, and again after SIGTERM
_ID = re.compile(rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,80}")')
_HEAD = 300  # bytes at either end of a message where its id is looked for
_INTERNAL_ERROR = -32603  # of JSON-RPC


class StdioSettings(BaseModel, extra="forbid", frozen=True, coerce_numbers_to_str=True):
    """A server program that reads requests from standard input and writes answers to standard output."""

    command: str | Path = Field(description="the program")
    args: list[str] = Field([], description="its arguments")
    env: dict[str, str] = Field({}, description="environment variables, beside PATH, HOME and the like")
    cwd: str | Path | None = Field(None, description="its working directory; null: that of this process")


class StdioServer:
    """One process of a server.

    ``is_open``: True while its output is read. ``pid``: its process id. ``stderr``: its last lines on standard error.
    """

    def __init__(self, settings: StdioSettings):
        self.is_open = False
        self.pid: int | None = None
        self._settings = settings
        self._stderr = bytearray()

    @property
    def stderr(self) -> str:
        return self._stderr.decode("utf-8", "replace").strip()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Any, Any]]:
        """The message streams from and to the server. Raises OSError for a command that cannot be run."""
        anyio = require("anyio", extra="mcp", used_by="MCPServers")
        package = require("mcp.client.stdio", extra="mcp", used_by="MCPServers")
        settings = self._settings
        process = await asyncio.create_subprocess_exec(
            settings.command,
            *settings.args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**package.get_default_environment(), **settings.env},
            cwd=settings.cwd,
            start_new_session=True,
            limit=MAX_LINE,
        )
        self.is_open, self.pid = True, process.pid
        answers, received = anyio.create_memory_object_stream(0)
        to_send, requests = anyio.create_memory_object_stream(0)
        tasks = [
            asyncio.create_task(self._read(process, answers)),
            asyncio.create_task(self._write(process, requests, answers)),
            asyncio.create_task(self._read_stderr(process)),
        ]
        try:
            yield received, to_send
        finally:
            self.is_open = False
            try:
                await _end(process)
            finally:
                signal_group(process.pid, signal.SIGKILL)  # even if this task is cancelled once more
                await _has_ended(process)
                await asyncio.wait(tasks, timeout=_GRACE_S / 2)
                for task in tasks:
                    task.cancel()
                for stream in (answers, received, to_send, requests):
                    stream.close()

    async def _read(self, process: asyncio.subprocess.Process, answers: Any) -> None:
        try:
            while (line := await _line(process.stdout)) is not None:
                if (message := _message(line)) is not None:
                    await answers.send(message)
        except Exception:  # the session is closed and accepts no more messages
            pass
        finally:
            self.is_open = False
            answers.close()
            signal_group(process.pid, signal.SIGTERM)  # it can no longer answer

    async def _write(self, process: asyncio.subprocess.Process, requests: Any, answers: Any) -> None:
        try:
            async for message in requests:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(f"{text}\n".encode())
                await process.stdin.drain()
        except OSError:  # the server exited: it will not answer
            answers.close()

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        while chunk := await process.stderr.read(1 << 16):
            self._stderr += chunk
            del self._stderr[:-_MAX_STDERR]


async def _line(stdout: asyncio.StreamReader) -> bytes | None:
    """The next line, or only its beginning if it is too long; None at the end."""
    head = b""
    while True:
        try:
            line = await stdout.readuntil(b"\n")
            return head or line
        except asyncio.IncompleteReadError as end:
            return None if head else end.partial or None
        except asyncio.LimitOverrunError as error:  # the rest is read and dropped
            head = head or (await stdout.readexactly(_HEAD))
            await stdout.readexactly(max(0, error.consumed - _HEAD))


def _message(line: bytes) -> Any:
    """The server's message in a line; an error message for a broken answer; None for anything else."""
    mcp = require("mcp", extra="mcp", used_by="MCPServers")
    messages = require("mcp.shared.message", extra="mcp", used_by="MCPServers")
    # An answer with some bytes that are not UTF-8 is still used, with those bytes replaced.
    for text in (line, line.decode("utf-8", "replace")):
        with contextlib.suppress(ValueError):
            return messages.SessionMessage(mcp.types.jsonrpc_message_adapter.validate_json(text, by_name=False))
    number, reason = _broken_answer(line)
    if number is None:
        return None
    error = mcp.types.ErrorData(code=_INTERNAL_ERROR, message=f"the server's answer cannot be used: {reason}")
    return messages.SessionMessage(mcp.types.JSONRPCError(jsonrpc="2.0", id=number, error=error))


def _broken_answer(line: bytes) -> tuple[int | str | None, str]:
    """The id of the request that a broken line answers, or None, and the reason why it cannot be read."""
    text = line.decode("utf-8", "replace")
    try:
        given = parse_json(text)
    except JSONError as error:
        # Without the id the answer could not be matched to its call, which would then wait until its deadline.
        found = _ID.search(line[:_HEAD]) or _ID.search(line[-_HEAD:])
        number = parse_json(found[1].decode("utf-8", "replace")) if found else None
        if not line.endswith(b"\n"):
            return number, f"it is longer than {MAX_LINE >> 20} MiB"
        return number, f"it is not JSON: {error}"
    if not isinstance(given, dict) or "method" in given or type(given.get("id")) not in (int, str):
        return None, ""
    kind = "error" if "error" in given else "result"
    content = given.get(kind)
    if isinstance(content, dict) and isinstance(content.get("message"), str):
        return given["id"], content["message"]
    return given["id"], f"its {kind} is {content!r:.200}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes the server's stdin and waits for it to exit; if it does not, sends SIGTERM to its process group."""
    process.stdin.close()
    if not await _has_ended(process):
        signal_group(process.pid, signal.SIGTERM)
        await _has_ended(process)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """True if the process exits in time; ``process.wait()`` would also wait for children that hold its pipes."""
    deadline = time.monotonic() + _GRACE_S
    while process.returncode is None and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return process.returncode is not None
