"""Environments of the package verifiers, which plays them in a process and a Python environment of its own.

`verifiers_program` runs there and plays one task per request. Its model calls come to the `RecordingEndpoint` of the
run; the id of a trace, which its clients send with each call, names rollout and seat.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from llmrl.concurrency.deadline import Outcome
from llmrl.concurrency.server_process import ServerProcess
from llmrl.endpoint.agents import AgentResult, Row, Seat
from llmrl.errors import ConfigError, DataError, RolloutError, did_you_mean
from llmrl.package_envs import installed_version, python_of
from llmrl.settings import Settings

COLUMN = "task"  # of the rows: a task's data as JSON
STARTS = 4  # of the program in one run: the first, and three after it has ended by itself
IN_A_ROW = 10  # rollouts that may fail one after the other

_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_MOST = 100_000  # tasks of a taskset
_LIST_S = 600.0  # for a taskset to load its data
_START_S = 300.0  # for imports, and for the servers of tools
_LOOK_S = 1.0  # between looks at whether a rollout was stopped
_ENDING_S = 5.0
_REFUSED = 3  # as `verifiers_program.REFUSED`
_SHOWN = 2000  # characters of the program's errors


class VerifiersOptions(Settings):
    """``env.options`` of the environment verifiers."""

    taskset: dict[str, Any] = Field(description="the name of a taskset, or its settings, in which id is the name")
    env: str = Field("", description="an environment that plays it, such as user_sim; empty: the taskset's own")
    config: dict[str, Any] = Field({}, description="settings of that environment: agent: {harness: {id: ...}}, ...")
    select: dict[str, Any] = Field({}, description="which tasks are trained: include, exclude, shuffle, skip, limit")
    eval: dict[str, Any] | None = Field(
        None, description="which are measured: {select: ..., taskset: ...}, the settings that differ; null: none"
    )
    seats: list[str] | None = Field(None, min_length=1, description="seats that are trained; null: all trainable ones")
    renderer: dict[str, Any] | None = Field(
        None, description="of the package renderers, which makes the ids of prompts; null: llmrl's endpoint makes them"
    )
    python: str | None = Field(None, description="of an environment with verifiers; null: the one of llmrl env install")
    processes: int = Field(1, ge=1, description="programs that play, each on a core: rollouts are divided among them")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Raises ConfigError, with the nearest name of an option that there is none of."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, ("env.options", *fault["loc"])))
            hint = did_you_mean(str(fault["loc"][-1]), cls.model_fields) if fault["type"] == "extra_forbidden" else ""
            raise ConfigError(f"verifiers: {place}: {fault['msg'].removeprefix('Value error, ')}.{hint}") from None

    @field_validator("taskset", "renderer", mode="before")
    @classmethod
    def _accept_a_name(cls, value: object, info: Any) -> object:
        return {"id" if info.field_name == "taskset" else "name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not isinstance(self.taskset.get("id"), str):
            raise ValueError("taskset must name one: taskset: reverse_text, or {id: reverse_text, ...}")
        if taken := sorted({"taskset", "id"} & self.config.keys()):
            raise ValueError(
                f"config must not have {taken[0]}: it is the option {'env' if taken[0] == 'id' else taken[0]}"
            )
        if self.renderer is not None and self.renderer.get("name", "auto") == "auto":
            # It goes by the model's name, and falls back to one without tools.
            raise ValueError("renderer must name one of the package renderers, such as qwen3 or default: got auto")
        unknown = sorted((self.eval or {}).keys() - {"select", "taskset"})
        if unknown or {"id", "task"} & (self.eval or {}).get("taskset", {}).keys():
            raise ValueError(
                "eval must have select and taskset, the latter without id and task, which play both splits"
            )
        return self

    def environment(self, *, measured: bool = False) -> dict[str, Any]:
        """The settings of verifiers' environment; ``measured``: of that whose tasks are measured."""
        changes = (self.eval or {}).get("taskset", {}) if measured else {}
        return {**self.config, "id": self.env, "taskset": {**self.taskset, **changes}}

    def selected(self, *, measured: bool = False) -> dict[str, Any]:
        return (self.eval or {}).get("select", {}) if measured else self.select


def verifiers_rows(options: Mapping[str, Any], *, split: str) -> Sequence[Row]:
    """The tasks of a split, "train" or another, which is measured; no measured task is a trained one.

    Raises  ConfigError for options that verifiers refuses; DataError for a taskset that fails or has no tasks;
            MissingDependencyError without an environment that has verifiers
    """
    chosen = VerifiersOptions.read(options)
    if split == "train":
        return [{COLUMN: task} for task in _tasks(chosen.model_dump_json(), False)]
    if chosen.eval is None:
        return []
    trained = {_content(task) for task in _tasks(chosen.model_dump_json(), False)}
    tasks = _tasks(chosen.model_dump_json(), True)
    kept = [{COLUMN: task} for task in tasks if _content(task) not in trained]
    if not kept:
        raise DataError(
            f"verifiers: measured tasks must not be trained: all {len(tasks)} of env.options.eval are; choose others "
            "by its select or taskset, and leave them out of env.options.select."
        )
    return kept


def verifiers_about(options: Mapping[str, Any]) -> str:
    """What the plan of a run says of it."""
    python = python_of("verifiers", VerifiersOptions.read(options).python)
    return f"verifiers {installed_version('verifiers', python)} in {python}"


def _content(task: str) -> str:
    """A task without its place in the taskset."""
    return json.dumps({key: value for key, value in json.loads(task).items() if key != "idx"}, sort_keys=True)


@lru_cache(maxsize=16)  # the plan, the run and the evaluation ask for the same tasks
def _tasks(options: str, measured: bool) -> tuple[str, ...]:
    chosen = VerifiersOptions.model_validate_json(options)
    asked = {"env": chosen.environment(measured=measured), "select": chosen.selected(measured=measured), "most": _MOST}
    with tempfile.TemporaryDirectory(prefix="llmrl-verifiers-") as folder:
        command = _command(chosen, "tasks", _written(folder, asked))
        try:
            done = subprocess.run(
                command, env=_variables(command), capture_output=True, text=True, errors="replace", timeout=_LIST_S
            )
        except subprocess.TimeoutExpired:
            name = chosen.taskset["id"]
            raise DataError(f"verifiers: {name} must load its tasks within {_LIST_S:g} s: it did not.") from None
    said = done.stderr.strip()
    if done.returncode == _REFUSED:
        raise ConfigError(f"verifiers: {said.rpartition(chr(10))[2]}.")
    if done.returncode:
        raise DataError(f"verifiers: {chosen.taskset['id']} must load its tasks: it failed:\n{said[-_SHOWN:]}")
    tasks = tuple(line for line in done.stdout.splitlines() if line.startswith("{"))
    if not tasks:
        raise DataError(f"verifiers: {chosen.taskset['id']} must have tasks: none is left by {asked['select']}.")
    return tasks


def _command(options: VerifiersOptions, mode: str, file: str) -> list[str]:
    # -P: the program's own folder holds modules of llmrl.
    return [str(python_of("verifiers", options.python)), "-P", str(_PROGRAM), mode, file]


def _variables(command: Sequence[str]) -> dict[str, str]:
    """The environment of the program: calls of this machine never go to a proxy, and its programs are found."""
    here = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    found = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)))
    return {**os.environ, "NO_PROXY": here, "no_proxy": here, "PATH": found}


def _written(folder: str, asked: Mapping[str, Any]) -> str:
    file = Path(folder, "asked.json")
    file.write_text(json.dumps(asked))
    return str(file)


class VerifiersAgent:
    """Plays tasks, as `Agent` runs a user's program. Its program is shared by all of the same options.

    options    ``env.options``, as `VerifiersOptions`
    tokenizer  of the policy, whose template the package renderers reads
    model      the name that the endpoint gives it
    scored     False: a task without a score has a reward of 0
    Raises     ConfigError, MissingDependencyError; RolloutError if the program does not start
    """

    by_session = True

    def __init__(
        self, options: Mapping[str, Any], tokenizer: Any, *, model: str = "llmrl", scored: bool = True
    ) -> None:
        self._scored, self._model = scored, model
        chosen = VerifiersOptions.read(options)
        self._servers = [_Server.shared(chosen, tokenizer, number) for number in range(chosen.processes)]
        self._turns = itertools.cycle(self._servers)
        self._lock = threading.Lock()
        self._met: set[str] = set()
        self._failing: list[str] = []  # the tasks of the failures since the last rollout that did not fail
        self._closed = False

    def call(self, base_url: str, key: str, row: Row, *, timeout_s: float, stopped: Callable[[], bool]) -> Outcome:
        """The outcome of one attempt, with an `AgentResult`; not ``done`` after ``timeout_s`` or if ``stopped``.

        Raises  RolloutError if the program has ended too often, or `IN_A_ROW` rollouts of different tasks have failed
        """
        end, task = time.monotonic() + timeout_s, row[COLUMN]
        asked = {"task": json.loads(task), "key": key, "base_url": base_url, "model": self._model}
        with self._lock:
            server = next(self._turns)
        try:
            answer = server.ask(asked, end, stopped)
            outcome = Outcome() if answer is None else self._outcome(answer)
        except (OSError, http.client.HTTPException) as error:
            return Outcome(error=server.ended(error), done=True)  # no fault of the task
        if not stopped():
            self._count(task, outcome.error if outcome.done else f"not done within {timeout_s:g} s")
        return outcome

    def _outcome(self, answer: Mapping[str, Any]) -> Outcome:
        if error := answer.get("error"):
            return Outcome(error=f"verifiers: {error}", done=True)
        traces = {session: (name, reward) for session, name, reward in answer["seats"]}
        if self._scored and any(reward is None for _, reward in traces.values()):
            return Outcome(error="verifiers: the task must give a reward: no method with @vf.reward did.", done=True)
        seats = {session: Seat(name, reward or 0.0) for session, (name, reward) in traces.items()}
        mean = sum(seat.reward for seat in seats.values()) / len(seats)
        several = {f"seat.{name}": reward for name, reward in seats.values()} if len(seats) > 1 else {}
        try:
            result = AgentResult.of({**answer["metrics"], **several, "reward": mean})
        except RolloutError as error:
            return Outcome(error=str(error), done=True)
        return Outcome(result._replace(seats=seats), done=True)

    def _count(self, task: str, error: str | None) -> None:
        with self._lock:
            self._met.add(task)
            self._failing = [*self._failing, task] if error else []
            tasks = len(set(self._failing))
            if len(self._failing) < IN_A_ROW or tasks < min(IN_A_ROW, len(self._met)):
                return  # a few bad tasks do not end a run
        raise RolloutError(
            f"verifiers: {len(self._failing)} rollouts of {tasks} tasks failed one after the other: {error}"
        )

    def close(self) -> None:
        """Ends the program if no other uses it; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for server in self._servers:
                server.release()


class _Server:
    """A program, started when it is made, or unless it is the first when it is asked; again if it ended."""

    @classmethod
    def shared(cls, options: VerifiersOptions, tokenizer: Any, number: int) -> _Server:
        """The ``number``-th of these options, which ends when each that asked for it has released it."""
        key = (options.model_dump_json(), id(tokenizer), number)
        with _servers_lock:
            server = _servers.get(key) or cls(options, tokenizer, key)
            server._users += 1
            _servers[key] = server
        return server

    def __init__(self, options: VerifiersOptions, tokenizer: Any, key: tuple[str, int, int]) -> None:
        self._key, self._users, self._lock = key, 0, threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="llmrl-verifiers-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        asked = {"env": options.environment(), "seats": options.seats, "renderer": options.renderer}
        asked |= {"port": self._port, "owner": os.getpid()}
        if options.renderer is not None:
            tokenizer.save_pretrained(self._folder.name)
            asked["tokenizer"] = self._folder.name
        command = _command(options, "serve", _written(self._folder.name, asked))
        output = Path(self._folder.name, "output").open("a+b")  # noqa: SIM115  closed with the program
        self._process = ServerProcess(f"http://127.0.0.1:{self._port}", command, _variables(command), output)
        if key[-1]:  # not the first: what can be wrong is known by then
            return
        try:
            self._start()
        except BaseException:
            self._stop()
            raise

    def ask(self, asked: Mapping[str, Any], end: float, stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """The answer to a request; None if it is ``stopped`` or time is up, which ends the rollout there too.

        Raises  OSError or HTTPException if the program ends; RolloutError if it cannot be started again
        """
        with self._lock:
            if not self._process.starts or self._process.exitcode is not None:
                self._start()
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=_START_S)) as connection:
            connection.request("POST", "/run", json.dumps(asked), {"content-type": "application/json"})
            answered = select.poll()
            answered.register(connection.sock, select.POLLIN)
            while not answered.poll(max(0.0, min(_LOOK_S, end - time.monotonic())) * 1000):
                if stopped() or time.monotonic() >= end:
                    return None
            return json.loads(connection.getresponse().read())

    def ended(self, error: BaseException) -> str:
        """Why a request had no answer. Returns when the program's end is known: the next request starts it."""
        end = time.monotonic() + _ENDING_S
        while self._process.exitcode is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._process.last_lines(f"verifiers: its program ended ({type(error).__name__}: {error}); its output:")

    def _start(self) -> None:
        """Starts the program and waits until it answers. Raises RolloutError with the end of its output."""
        if self._process.starts >= STARTS:
            raise RolloutError(self._process.last_lines(f"verifiers: its program ended {STARTS} times; its output:"))
        self._process.start()
        end = time.monotonic() + _START_S
        while not self._process.answers():
            if (code := self._process.exitcode) == _REFUSED:
                raise ConfigError(f"verifiers: {self._process.last_lines('').splitlines()[-1].strip()}.")
            if code is not None or time.monotonic() > end:
                raise RolloutError(
                    self._process.last_lines("verifiers: its program must start: it did not; its output:")
                )
            time.sleep(0.05)

    def release(self) -> None:
        with _servers_lock:
            self._users -= 1
            if self._users:
                return
            del _servers[self._key]
        self._stop()

    def _stop(self) -> None:
        if self._process.starts:
            self._process.stop(_ENDING_S)
        self._process.output.close()
        self._folder.cleanup()


_servers: dict[tuple[str, int, int], _Server] = {}
_servers_lock = threading.Lock()
