"""Environments of OpenEnv (0.10) behind a URL or a local command: a session of the server for each conversation.

`OpenEnvServer` speaks the protocol of OpenEnv's clients, whose package is not needed: it requires an older ``mcp`` than
tools do.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import shlex
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from llmrl.concurrency.deadline import AsyncRunner, Calls
from llmrl.concurrency.server_process import ServerProcess
from llmrl.data.llm.row_reading import PROMPT_COLUMNS
from llmrl.envs.llm.tasks.episodes import EpisodeEnv
from llmrl.envs.llm.tasks.task import Row
from llmrl.envs.llm.transforms.episodes import EPISODE, EpisodeTurns, Observed, as_json
from llmrl.errors import ConfigError, DataError, DeadlineError, RolloutError, did_you_mean
from llmrl.loading import load_function
from llmrl.optional import require
from llmrl.tools import Tool
from llmrl.tools.base import ToolError, ToolTimeout

MAX_MESSAGE = 100 * 2**20  # bytes, as OpenEnv's client
_LOST = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # errors after which the server closes the connection
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
_CONNECT_S, _HTTP_S, _CLOSE_S = 10.0, 30.0, 5.0
_LOOK_S = 0.2  # between looks at whether a server has started, or has a session free
_IDLE_S = 120.0  # after which a session is taken from a conversation that was abandoned, if another waits for one

Action = dict[str, Any]


class OpenEnvEnv(EpisodeEnv):
    """Conversations with an environment of OpenEnv: `turns` has the options.

    The policy acts by tools: those of an MCP environment, with their schemas, or one tool with the schema of the
    environment's actions. With ``action``, a function of the user's, it acts by its text. Rows are seeds, or with
    ``tasks`` those of one of the server's splits.
    """

    @classmethod
    def rows(
        cls,
        dataset: str | Path | None = None,
        *,
        name: str | None = None,
        split: str | None = None,
        items: int | None = None,
        eval_items: int = 0,
        items_seed: int = 0,
        prompt: str | None = None,
        tasks: Mapping[str, str] | None = None,
        url: str | None = None,
        command: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> Sequence[Row]:
        """As `EpisodeEnv.rows`; with ``tasks``, {"split": NAME}, the first ``items`` tasks of a split of the server,
        and for another split the tasks of its name, if it has them. The environment's reset gets the keys of a task,
        "task", "split", "index" and "seed", as far as it takes them.
        """
        if dataset is not None or tasks is None:
            seeds = {"items": items, "eval_items": eval_items, "items_seed": items_seed, "prompt": prompt}
            return super().rows(dataset, name=name, split=split, **seeds)
        if not isinstance(tasks, Mapping) or set(tasks) != {"split"}:
            raise ConfigError(f"openenv: env.options.tasks must be as {{split: train}}: got {tasks!r:.80}.")
        server = OpenEnvServer.shared(url, command, headers, start_timeout_s)
        known, trained = server.splits(), split in (None, "train")
        wanted = tasks["split"] if trained else split
        if wanted not in known:
            if not trained:
                return []
            has = ", ".join(known) or "which has none"
            raise ConfigError(
                f"openenv: env.options.tasks.split must be one of the server's, {has}: got {wanted!r}."
                f"{did_you_mean(str(wanted), known)}"
            )
        found = server.tasks(wanted)[: items if trained else (eval_items or None)]
        return [_task_row(task, wanted, index, items_seed, prompt) for index, task in enumerate(found)]

    @classmethod
    def turns(
        cls,
        *,
        url: str | None = None,
        command: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        action: str | Callable[[str], Action] | None = None,
        observation: str | None = None,
        reward: str = "sum",
        start_timeout_s: float = 120.0,
        step_timeout_s: float = 60.0,
        max_chars: int = 16000,
    ) -> tuple[Sequence[Tool], EpisodeTurns]:
        """The tools of the environment, none with ``action``, and the transform that keeps its sessions.

        url              of a running server; or ``command``, which starts one that listens at {port}
        headers          of every request, for a key say
        action           the function that makes an action of the policy's text; the model reads its ValueError
        observation      the field that the policy reads; None: the only text of an observation, else all as JSON
        reward           "sum" or "last" of the rewards of an episode's steps
        start_timeout_s  seconds in which a server must start, and an episode; step_timeout_s: for a step
        max_chars        of one observation; the middle of a longer one is cut, with a notice
        """
        server = OpenEnvServer.shared(url, command, headers, start_timeout_s)
        act = load_function(action, what="action") if isinstance(action, str) else action
        limits = {"start_timeout_s": start_timeout_s, "step_timeout_s": step_timeout_s, "max_chars": max_chars}
        make = partial(_Session, server, act, observation)
        turns = EpisodeTurns(make, by_text=act is not None, reward=reward, on_close=server.close, **limits)
        if act is not None:
            return [], turns
        return [_ActingTool(turns, **described) for described in server.tools()], turns

    @classmethod
    def about(
        cls,
        eval_split: str | None,
        *,
        at_once: int,
        url: str | None = None,
        command: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        action: str | None = None,
        start_timeout_s: float = 120.0,
        **options: Any,
    ) -> str:
        """Raises ConfigError for a server with fewer sessions than conversations ``at_once``."""
        server = OpenEnvServer.shared(url, command, headers, start_timeout_s)
        free, most = server.count_sessions(at_once)
        if free < at_once:
            has = f"{most} in all, {free} of them free" if most is not None else f"only {free}"
            raise ConfigError(
                f"openenv: a session is needed for each of the {at_once} conversations at a time: the server at "
                f"{server.url} has {has}; start it with max_concurrent_envs={at_once} (its "
                "environment needs SUPPORTS_CONCURRENT_SESSIONS), or set prompts_per_step, group_size or "
                "eval.batch_size lower."
            )
        about = server.metadata()
        acts = f"by the text, {action}" if action else f"tools {', '.join(tool['name'] for tool in server.tools())}"
        named = f"{about.get('name', 'environment')} {about.get('version') or ''}".strip()
        return f"openenv, protocol of 0.10 · {named} at {server.url} · {acts} · {at_once} sessions"


class OpenEnvServer:
    """A server, which `shared` gives to all that have the same settings; one that it started ends with `close`.

    Raises  ConfigError for unusable settings; DeadlineError for a server that does not answer in ``start_timeout_s``
            seconds, with the last lines of a command's output
    """

    _shared: ClassVar[dict[str, OpenEnvServer]] = {}
    _lock = threading.RLock()

    def __init__(
        self,
        url: str | None,
        command: str | Sequence[str] | None,
        headers: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ):
        if (url is None) == (command is None):
            got = "neither" if url is None else "both"
            raise ConfigError(f"openenv: env.options must have either url or command: got {got}.")
        if url is not None and urlsplit(str(url)).scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"openenv: env.options.url must be as http://127.0.0.1:8000: got {url!r}.")
        self._connect = require("websockets.asyncio.client", extra="openenv", used_by="openenv").connect
        self.headers, self.start_timeout_s = dict(headers or {}), start_timeout_s
        self._process: ServerProcess | None = None
        self._words = shlex.split(command) if isinstance(command, str) else list(command or ())
        self.url = re.sub("^ws", "http", str(url)).rstrip("/") if url is not None else ""
        self._idle: list[Any] = []  # open connections whose episodes are over
        self._sessions: dict[_Session, float] = {}  # with a connection -> when it last answered
        if self._words:
            self._start()
        self._wait()

    @classmethod
    def shared(
        cls,
        url: str | None,
        command: str | Sequence[str] | None,
        headers: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> OpenEnvServer:
        """The server of these settings, connected to or started if this is the first that asks."""
        key = json.dumps([url, command, dict(headers or {})], default=str)
        with cls._lock:
            if key not in cls._shared:
                wait_s = start_timeout_s if url is None else min(start_timeout_s, _CONNECT_S)
                cls._shared[key] = cls(url, command, headers, wait_s)
            return cls._shared[key]

    # -- the process ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [os.path.expanduser(word.replace("{port}", str(port))) for word in self._words]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = ServerProcess(self.url, words, {"PORT": str(port)}, output, strictly=True)
        try:
            self._process.start()
        except OSError as error:
            output.close()
            raise ConfigError(f"openenv: env.options.command must start a server: {words[0]}: {error}.") from error
        atexit.register(self.close)

    def _wait(self) -> None:
        end, process = time.monotonic() + self.start_timeout_s, self._process
        while True:
            with suppress(OSError, ValueError):
                if self._get("/health"):
                    return
            ended = process is not None and process.exitcode is not None
            if ended or time.monotonic() >= end:
                what = f"it ended with {process.exitcode}" if ended else f"no answer within {self.start_timeout_s:g} s"
                said = process.last_lines(" Its output:") if process else ""
                self.close()
                raise DeadlineError(f"openenv: the server at {self.url} must answer its health check: {what}.{said}")
            time.sleep(_LOOK_S)

    def _restart(self) -> None:
        """Starts a command's server again if it has ended."""
        with self._lock:
            if self._process is not None and self._process.exitcode is not None:
                self._process.start()
                self._wait()

    def close(self) -> None:
        """Closes idle connections, and ends a server that was started; may be called twice."""
        with self._lock:
            for key in [key for key, server in self._shared.items() if server is self]:
                del self._shared[key]
            idle, self._idle = self._idle, []
            process, self._process = self._process, None
        for connection in idle:
            _close(connection)
        if process is not None:
            process.stop(_CLOSE_S)
            process.output.close()
            atexit.unregister(self.close)

    # -- what it says of the environment -------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """Name and version of the environment."""
        return self._asked("/metadata")

    def splits(self) -> list[str]:
        """The names of the splits of its tasks; none if it has no tasks."""
        return [split["name"] for split in self._asked(f"/{self._name()}/splits", missing=[])]

    def tasks(self, split: str) -> list[Any]:
        """The tasks of a split."""
        return self._asked(f"/{self._name()}/tasks", {"split": split})["tasks"]

    def tools(self) -> list[dict[str, Any]]:
        """Arguments of `_ActingTool`: for each tool of an MCP environment, or one for the actions of another.

        Raises  ConfigError for actions that are not an object of JSON
        """
        schema = self._asked("/schema")["action"]
        if schema.get("title") in _MCP_ACTIONS:
            return [
                {
                    "name": tool["name"],
                    "description": tool["description"],
                    "schema": tool["input_schema"],
                    "is_mcp": True,
                }
                for tool in self._run(self._list_tools())
            ]
        fields = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        if not fields:
            raise ConfigError(
                f"openenv: the actions of {self.url} have no schema ({schema.get('title')}): set env.options.action to "
                "a function that makes an action of the policy's text."
            )
        title = re.sub("Action$", "", schema.get("title", "")) or "act"
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
        text = schema.get("description") or "Acts in the environment."
        return [{"name": name, "description": text, "schema": {**schema, "properties": fields}, "is_mcp": False}]

    async def _list_tools(self) -> list[dict[str, Any]]:
        connection = await self._open()
        try:
            return (await ask(connection, "step", {"type": "list_tools"}))["observation"]["tools"]
        finally:
            await connection.close()

    def count_sessions(self, wanted: int) -> tuple[int, int | None]:
        """How many of ``wanted`` sessions it gives at a time; and if fewer, how many it has in all, if it says so."""
        return self._run(self._count(wanted))

    async def _count(self, wanted: int) -> tuple[int, int | None]:
        opened = await asyncio.gather(*(self._open() for _ in range(wanted)), return_exceptions=True)
        connections = [each for each in opened if not isinstance(each, BaseException)]
        await asyncio.gather(*(connection.close() for connection in connections))
        errors = [each for each in opened if isinstance(each, BaseException)]
        if other := [each for each in errors if not (isinstance(each, Refused) and each.code == "CAPACITY_REACHED")]:
            raise other[0]
        return len(connections), errors[0].most if errors else None

    def _run(self, coroutine: Any) -> Any:
        runner = AsyncRunner("openenv", 1)
        (outcome,) = runner.run(Calls([lambda: coroutine]), timeout_s=self.start_timeout_s)
        runner.close()
        if not outcome.done or outcome.error is not None:
            why = outcome.error or f"no answer within {self.start_timeout_s:g} s"
            raise RolloutError(f"openenv: the server at {self.url} must open sessions: {why}")
        return outcome.value

    def _name(self) -> str:
        return self._asked("/list_environments")[0]

    def _asked(self, path: str, body: Any = None, missing: Any = None) -> Any:
        try:
            return self._get(path, body)
        except urllib.error.HTTPError as error:
            if error.code in (404, 501) and missing is not None:
                return missing
            raise DataError(f"openenv: {self.url}{path}: {error.code}: {error.read()[:200]!r}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"openenv: {self.url}{path} cannot be read: {error}") from error

    def _get(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", "User-Agent": "llmrl", **self.headers}
        )
        with urllib.request.urlopen(request, timeout=_HTTP_S) as answer:
            return json.load(answer)

    # -- sessions, in the event loop -----------------------------------------------------------------------------------

    async def take(self) -> Any:
        """A connection whose session no conversation has: one that is idle, or a new one. Waits while there is none."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is not None:
                if idle.state.name == "OPEN" and idle.loop is asyncio.get_running_loop():
                    return idle
                _close(idle)
                continue
            try:
                return await self._open()
            except Refused as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                self._reclaim()
            except OSError:
                if self._process is None:
                    raise
                await asyncio.to_thread(self._restart)
            await asyncio.sleep(_LOOK_S)

    async def _open(self) -> Any:
        local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        # On one machine, to compress a message takes longer than to send it.
        options = {"proxy": None, "compression": None} if local else {}
        connection = await self._connect(
            re.sub("^http", "ws", self.url) + "/ws", max_size=MAX_MESSAGE, additional_headers=self.headers, **options
        )
        try:
            await ask(connection, "state")  # the server says only now whether it has a session for this connection
        except Refused as error:
            if error.code in _LOST:
                await connection.close()
                raise
        return connection

    def _reclaim(self) -> None:
        """Takes the session of the conversation that was silent for longest: it was abandoned without a word."""
        with self._lock:
            oldest = min(self._sessions, key=self._sessions.__getitem__, default=None)
            silent_s = 0.0 if oldest is None else time.monotonic() - self._sessions[oldest]
        if oldest is not None and silent_s > _IDLE_S:
            oldest.close()

    def used(self, session: _Session) -> None:
        with self._lock:
            self._sessions[session] = time.monotonic()

    def give(self, session: _Session, connection: Any, *, reusable: bool) -> None:
        """Takes the connection of an episode that is over."""
        with self._lock:
            self._sessions.pop(session, None)
            if reusable:
                self._idle.append(connection)
                return
        _close(connection)


class Refused(Exception):
    """An error that the server answered; ``most`` sessions, if it has said so."""

    def __init__(self, data: Mapping[str, Any]):
        self.code, self.most = str(data.get("code", "")), data.get("max_sessions")
        details = "; ".join(
            f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in data.get("errors") or ()
        )
        super().__init__(f"{self.code}: {data.get('message')}{details and ': ' + details}")


async def ask(connection: Any, kind: str, data: Action | None = None) -> dict[str, Any]:
    """The data of the server's answer to one message. Raises `Refused`, and the errors of websockets."""
    with suppress(OSError, _closed_error()):  # the reason is in what it has sent before it closed
        await connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
    answer = json.loads(await connection.recv())
    if answer["type"] == "error":
        raise Refused(answer["data"])
    return answer["data"]


class _Session:
    """An `Episode`: one conversation's use of a connection. Its reset begins the episode, as with OpenEnv's clients."""

    def __init__(self, server: OpenEnvServer, make_action: Callable[[str], Action] | None, observation: str | None):
        self._server, self._make_action, self._observation = server, make_action, observation
        self._connection: Any = None
        self._asks = False  # an answer is due: the connection cannot be used for anything else

    async def start(self, **row: Any) -> Observed:
        self._connection = await self._server.take()
        return await self._ask("reset", row)

    async def step(self, text: str) -> Observed:
        try:
            action = self._make_action(text)
        except ValueError as error:
            return Observed(str(error), refused=True)
        return await self.act(action)

    async def act(self, action: Action) -> Observed:
        """Takes a step; an action that does not fit the schema is refused, and the episode goes on."""
        try:
            return await self._ask("step", action)
        except Refused as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Observed(str(error), refused=True)

    async def _ask(self, kind: str, data: Action) -> Observed:
        if self._connection is None:
            raise RolloutError(f"openenv: the session was closed: it was silent for more than {_IDLE_S:g} s.")
        self._server.used(self)
        self._asks = True
        try:
            answer = await ask(self._connection, kind, data)
        except Refused:
            self._asks = False
            raise
        self._asks = False
        self._server.used(self)
        text, refused = _text(answer.get("observation") or {}, self._observation)
        reward = answer.get("reward")
        return Observed(text, None if reward is None else float(reward), bool(answer.get("done")), refused=refused)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.give(self, connection, reusable=not self._asks)


class _ActingTool(Tool):
    """A tool whose call is a step of the conversation's episode."""

    def __init__(self, turns: EpisodeTurns, *, name: str, description: str, schema: dict[str, Any], is_mcp: bool):
        self.name, self.description, self.parameters = name, description, schema
        self.timeout_s = turns.step_timeout_s
        self._turns, self._is_mcp = turns, is_mcp
        self._runner = AsyncRunner("openenv", 1)

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        state = self._turns.running.get(conversation[1])
        if state is None or state.is_over:
            raise ToolError("The episode is over.")
        step = {"type": "call_tool", "tool_name": self.name, "arguments": arguments} if self._is_mcp else arguments
        left = max(0.0, deadline - time.monotonic())
        (outcome,) = self._runner.run(Calls([partial(state.episode.act, step)]), timeout_s=left)
        if not outcome.done:
            state.error = f"{self.name}: no answer within {left:.3g} s"
            raise ToolTimeout(state.error)
        if outcome.error is not None:
            state.error = outcome.error
            raise ToolError("The environment failed.")
        state.seen.append(outcome.value)
        if outcome.value.refused:
            raise ToolError(outcome.value.text)
        return outcome.value.text

    def close(self) -> None:
        self._runner.close()


def _task_row(task: Any, split: str, index: int, first_seed: int, prompt: str | None) -> Row:
    keys = task if isinstance(task, Mapping) else {}
    asks = next((keys[name] for name in PROMPT_COLUMNS if isinstance(keys.get(name), str)), "")
    row = {"seed": first_seed + index, **keys, "task": task, "split": split, "index": index}
    return {"query": asks if prompt is None else prompt, EPISODE: as_json(row)}


def _text(observation: Mapping[str, Any], field: str | None) -> tuple[str, bool]:
    """What the policy reads of an observation, and True if it says that a tool refused the call.

    >>> _text({"text": "At 3.", "metadata": {"steps": 3}}, None)
    ('At 3.', False)
    >>> _text({"board": [0, 1], "player": "x"}, None)
    ('{"board": [0, 1], "player": "x"}', False)
    """
    if field is not None:
        if field not in observation:
            near = did_you_mean(field, observation)
            raise RolloutError(
                f"openenv: env.options.observation: there is no {field!r} in {', '.join(observation)}.{near}"
            )
        return _words(observation[field]), False
    if "tool_name" in observation and "result" in observation:
        if error := observation.get("error"):
            return str(error.get("message", error)), True
        result = observation["result"]
        if isinstance(result, Mapping) and "content" in result:
            parts = [part["text"] if part.get("type") == "text" else json.dumps(part) for part in result["content"]]
            return "\n".join(parts), bool(result.get("is_error"))
        return _words(result), False
    fields = {
        name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [], {})
    }
    if len(fields) == 1:
        return _words(next(iter(fields.values()))), False
    return (_words(fields) if fields else ""), False


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _close(connection: Any) -> None:
    """Closes a connection from any thread, without waiting for it."""
    with suppress(RuntimeError):  # its event loop has ended, and the connection with it
        asyncio.run_coroutine_threadsafe(connection.close(), connection.loop)


def _closed_error() -> type[Exception]:
    return require("websockets.exceptions", extra="openenv", used_by="openenv").ConnectionClosed
