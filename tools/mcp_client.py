"""Tools of MCP servers, through the official ``mcp`` package (version 2): stdio and streamable HTTP.

Every tool of a server becomes a `Tool` with the server's schema. All connections of one `MCPServers` run in one
background event loop, which sends calls from any number of threads concurrently. `mcp_stdio` runs a server's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from llmrl.concurrency.background_loop import BackgroundLoop
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, MissingDependencyError, did_you_mean
from llmrl.optional import require
from llmrl.tools.base import Tool, ToolError, ToolTimeout
from llmrl.tools.mcp_stdio import StdioServer, StdioSettings

_MAX_RESTARTS = 1
_PING_S = 5.0  # for a server to answer a ping after a call that timed out
_CLOSE_S = 8.0  # a server gets 2 s to exit and 2 s more after SIGTERM, then it is killed


class HTTPSettings(BaseModel, extra="forbid", frozen=True):
    """A server reached by streamable HTTP."""

    url: str = Field(min_length=1, description="address of its endpoint")
    headers: dict[str, str] = Field({}, description="of every request, for a key say")


class MCPServers(contextlib.AbstractContextManager):
    """Connections to servers, and their tools.

    Reads   servers          name -> {"command", "args", "env", "cwd"}, {"url", "headers"}, or a command line or URL as
                             a string. Besides ``env``, a command gets only basic variables such as PATH and HOME
            start_timeout_s  time until every server must have listed its tools
    Raises  ConfigError for unusable settings or a server that does not start, DeadlineError for one that does not
            answer; both include its stderr. MissingDependencyError without the package

    ``tools`` holds the tools of all servers, in order; a name that two servers share gets the server's name as prefix.
    A server that exits, or that lets a call time out and does not answer a ping, fails its current calls and is
    restarted at the next call; if it exits again before it has answered a call, it is not restarted any more. An answer
    above 16 MiB, or one that breaks the protocol, is an error of its call.
    """

    def __init__(self, servers: Mapping[str, Mapping[str, Any] | str], *, start_timeout_s: float = 30.0):
        if not hasattr(_mcp(), "Client"):
            advice = "an older one is installed; run: pip install 'llmrl[mcp]'"
            raise MissingDependencyError(f"MCPServers: needs version 2 of the package 'mcp': {advice}.")
        if not isinstance(servers, Mapping) or not servers:
            raise ConfigError(f"MCPServers: servers must map at least one name to its settings: got {servers!r:.80}.")
        self._loop = BackgroundLoop("mcp")
        self._connections = [
            _Connection(name, _settings(name, given), start_timeout_s) for name, given in servers.items()
        ]
        deadline = time.monotonic() + start_timeout_s
        try:
            for connection in self._connections:  # they start together
                self._loop.run(connection.start(), deadline)
            for connection in self._connections:
                self._wait_for(connection, deadline, start_timeout_s)
        except BaseException:
            self.close()
            raise
        # Only shared names get a prefix: models handle a tool best under its original name.
        names = Counter(tool.name for connection in self._connections for tool in connection.listed)
        self.tools: list[MCPTool] = [
            MCPTool._of(self, connection, tool, shared=names[tool.name] > 1)
            for connection in self._connections
            for tool in connection.listed
        ]

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the servers that were started; may be called twice."""
        with contextlib.suppress(LLMRLError, TimeoutError):  # closed before, or a server that cannot be killed
            self._loop.run(self._stop_all(), time.monotonic() + _CLOSE_S)
        self._loop.close()

    async def _stop_all(self) -> None:
        await asyncio.gather(*(connection.stop() for connection in self._connections))

    def _wait_for(self, connection: _Connection, deadline: float, timeout_s: float) -> None:
        try:
            self._loop.run(connection.client(), deadline=deadline)
        except TimeoutError:
            raise DeadlineError(
                f"MCPServers: server {connection.name!r} must list its tools within {timeout_s:g} s: it did not."
                f"{connection.stderr()}"
            ) from None
        except Exception as error:
            reason = f"{_reason(error)}.{connection.stderr()}"
            raise ConfigError(f"MCPServers: server {connection.name!r} must start: {reason}") from error


class MCPTool(Tool):
    """One tool of one server; ``MCPTool({"command": "my-server"}, "lookup")`` starts its own server.

    Raises  ConfigError if the server has no such tool; otherwise as `MCPServers`
    """

    def __init__(self, server: Mapping[str, Any] | str, tool: str, *, start_timeout_s: float = 30.0):
        servers = MCPServers({"server": server}, start_timeout_s=start_timeout_s)
        known = {made.name: made for made in servers.tools}
        if tool not in known:
            servers.close()
            names, hint = ", ".join(known) or "none", did_you_mean(tool, known)
            raise ConfigError(f"MCPTool: the server must have the tool {tool!r}: it has {names}.{hint}")
        self.__dict__.update(known[tool].__dict__)

    @classmethod
    def _of(cls, servers: MCPServers, connection: _Connection, listed: Any, *, shared: bool) -> MCPTool:
        self = cls.__new__(cls)
        self._servers, self._connection, self._listed_name = servers, connection, listed.name
        self.name = f"{connection.name}_{listed.name}" if shared else listed.name
        self.description = listed.description or listed.title or listed.name
        self.parameters = dict(listed.input_schema)
        return self

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        try:
            result = self._servers._loop.run(self._connection.call(self._listed_name, arguments), deadline)
        except TimeoutError:
            raise ToolTimeout(f"{self.name}: server {self._connection.name!r} did not answer in time.") from None
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{self.name}: failed without a message.")
        return text

    def close(self) -> None:
        """Closes all connections of its `MCPServers`, for all of their tools."""
        self._servers.close()


class _Connection:
    """One server; its methods run in the background loop. One task both opens and closes the connection."""

    def __init__(self, name: str, settings: StdioSettings | HTTPSettings, start_timeout_s: float):
        self.name = name
        self.listed: list[Any] = []
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._server: StdioServer | None = None
        self._check: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._starts = 0

    async def start(self) -> None:
        """Starts the server if it is not running; :meth:`client` waits until it is ready."""
        if self._ready is None:
            if self._starts > _MAX_RESTARTS:
                raise ToolError(f"MCP server {self.name!r} ended again after a restart; it cannot be called any more.")
            self._starts += 1
            self._ready, self._stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._serve(self._ready, self._stop))

    async def client(self) -> Any:
        """The open connection. Raises the server's start error, if any."""
        await self.start()
        return await asyncio.shield(self._ready)  # a call's deadline does not cancel the start

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        try:
            client = await self.client()
        except ToolError:
            raise
        except Exception as error:
            self._ready = None
            raise ToolError(f"MCP server {self.name!r} could not be started again: {_reason(error)}.") from error
        ready = self._ready
        try:
            result = await client.call_tool(tool, dict(arguments))
            self._starts = 1  # it works: allow restarts again
            return result
        except asyncio.CancelledError:  # its deadline
            self._check_on(ready, client)
            raise
        except _mcp().MCPError as error:
            if not self._is_closed(error):
                raise ToolError(f"{tool}: {error}") from error
            reason = "it ended"
        except (ValueError, RuntimeError) as error:  # not a tool result, or one that does not fit the declared schema
            self._check_on(ready, client)
            raise ToolError(f"{tool}: the server's answer cannot be used: {_reason(error)}.") from error
        except Exception as error:
            reason = _reason(error)
        self._lose(ready)
        raise ToolError(f"MCP server {self.name!r} was lost during the call: {reason}.")

    def _lose(self, ready: asyncio.Future[Any]) -> None:
        """Closes a failed connection, so that the next call opens a new one."""
        if self._ready is ready:  # only the first of the calls that failed with it does this
            self._ready = None
            self._stop.set()

    def _is_closed(self, error: Any) -> bool:
        """True if the connection is closed. The code alone is not enough: servers may use it for other errors."""
        return error.code == _mcp().types.CONNECTION_CLOSED and (self._server is None or not self._server.is_open)

    def _check_on(self, ready: asyncio.Future[Any], client: Any) -> None:
        """Closes the connection if the server does not answer a ping."""

        async def check() -> None:
            types = _mcp().types
            ping = types.PingRequest(params=types.RequestParams())
            try:
                await asyncio.wait_for(client.session.send_request(ping, types.EmptyResult), _PING_S)
            except Exception as error:  # any other error is also an answer
                closed = isinstance(error, _mcp().MCPError) and self._is_closed(error)
                if closed or isinstance(error, TimeoutError):
                    self._lose(ready)

        if self._ready is ready and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(check())

    async def stop(self) -> None:
        if self._check is not None:
            self._check.cancel()
        if self._task is not None:
            if self._ready is not None and not self._ready.done():
                self._task.cancel()  # it is still starting
            self._stop.set()
            await asyncio.wait([self._task], timeout=_CLOSE_S)
            self._ready = self._task = None

    def stderr(self) -> str:
        """The last lines of the server's stderr, for an error message."""
        text = self._server.stderr if self._server is not None else ""
        return f" Its stderr:\n{text}" if text else ""

    async def _serve(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._start_timeout_s):  # applies to restarts too
                    client = await self._open(stack)
                    self.listed = await _all_tools(client)
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError("was cancelled"))
                ready.exception()  # marks it as retrieved, in case no call awaits it
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        settings = self._settings
        if isinstance(settings, StdioSettings):
            self._server = StdioServer(settings)
            transport = self._server.open()
        elif settings.headers:
            http = require("mcp.client.streamable_http", extra="mcp", used_by="MCPServers")
            client = await stack.enter_async_context(http.create_mcp_http_client(headers=settings.headers))
            transport = http.streamable_http_client(settings.url, http_client=client)
        else:
            transport = settings.url
        return await stack.enter_async_context(_mcp().Client(transport))


def _mcp() -> Any:
    return require("mcp", extra="mcp", used_by="MCPServers")


async def _all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    listed = page.tools
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        listed += page.tools
    return listed


def _settings(name: str, given: Any) -> StdioSettings | HTTPSettings:
    if isinstance(given, str):
        if given.startswith(("http://", "https://")):
            given = {"url": given}
        else:
            try:
                command, *args = shlex.split(given) or [""]
            except ValueError as error:
                raise ConfigError(
                    f"MCPServers: the command line of server {name!r} cannot be read: {error}: got {given!r:.200}."
                ) from None
            given = {"command": command, "args": args}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"MCPServers: server {name!r} must be a mapping, a command line or a URL: got {type(given).__name__}."
        )
    kinds = {"command": StdioSettings, "url": HTTPSettings}
    named = [kind for kind in kinds if given.get(kind)]
    if len(named) != 1:
        raise ConfigError(f"MCPServers: server {name!r} must have either a command or a url: got {list(given)}.")
    model = kinds[named[0]]
    try:
        # A settings file may write null for a setting that is not used.
        return model.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as failure:
        fault, known = failure.errors(include_url=False)[0], list(model.model_fields)
        setting = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            problem = f"no setting {setting!r}: known are {', '.join(known)}.{did_you_mean(setting, known)}"
        else:
            problem = f"an unusable {setting!r}: {fault['msg']}: got {fault['input']!r:.80}."
        raise ConfigError(f"MCPServers: server {name!r} has {problem}") from None


def _text_of(result: Any) -> str:
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        if getattr(block, "text", None) is not None:
            parts.append(block.text)
        elif getattr(resource, "text", None) is not None:
            parts.append(resource.text)
        elif getattr(block, "data", None) is not None:
            parts.append(f"[{block.type}, {getattr(block, 'mime_type', 'unknown type')}, not shown]")
        else:
            parts.append(f"[{block.type} {getattr(resource or block, 'uri', '')}, not shown]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The innermost error as text; the package wraps errors in exception groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": .")
