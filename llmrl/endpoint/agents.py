"""`Agent`: a user's program that gets the endpoint's address, a key and a row of the data, and returns its reward.

A function runs in a thread, a coroutine function in the process's event loop for users. A program runs in a process
group of its own, which ends with it; so does a function that ``process`` keeps out of this process, by this module's
``__main__``.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from llmrl.concurrency.deadline import AsyncRunner, Calls, Outcome, ThreadRunner, runner_of
from llmrl.concurrency.processes import signal_group
from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.loading import load_function

Row = Mapping[str, Any]

_LOOK_S = 0.02  # between looks at whether a program has ended
_SHOWN = 2000  # characters of a failed program's errors


class Seat(NamedTuple):
    """One of several agents in a rollout, and its reward; "": the only one."""

    name: str
    reward: float


class AgentResult(NamedTuple):
    """The reward of a rollout, other numbers by name, and the seats that are trained by session; None: all."""

    reward: float
    metrics: Mapping[str, float]
    seats: Mapping[str, Seat] | None = None

    @classmethod
    def of(cls, value: Any, *, needed: bool = True, seats: Sequence[str] | None = None) -> AgentResult:
        """From what an agent returned; None is 0 unless a reward is ``needed``. With ``seats``, which are also its
        sessions, it has the reward of each by its name, and is their mean.

        Raises  RolloutError for anything but finite numbers

        >>> AgentResult.of({"reward": True, "turns": 3})
        AgentResult(reward=1.0, metrics={'turns': 3.0}, seats=None)
        >>> AgentResult.of({"white": 1, "black": -1}, seats=["black"]).seats
        {'black': Seat(name='black', reward=-1.0)}
        """
        if value is None and not needed:
            return cls(0.0, {})
        given = dict(value) if isinstance(value, Mapping) else {"reward": value}
        for key in seats or ("reward",):
            if key not in given:
                raise RolloutError(
                    f"agent: a mapping must have {key!r}: got {', '.join(map(repr, given)) or 'nothing'}."
                )
        for name, number in given.items():
            if not isinstance(number, Real) or not math.isfinite(number):
                raise RolloutError(f"agent: must return a finite number as {name}: got {number!r:.200}.")
        numbers = {str(name): float(number) for name, number in given.items()}
        if seats is None:
            return cls(numbers.pop("reward"), numbers)
        mean = math.fsum(numbers[name] for name in seats) / len(seats)
        return cls(mean, numbers, {name: Seat(name, numbers[name]) for name in seats})


class Agent:
    """Exactly one of a function ``name`` and a ``command``.

    name      "module:name" of a function or coroutine function, called as ``f(base_url, api_key, row)``
    command   of a program, which gets the row as JSON on its input, and the address and the key in OPENAI_BASE_URL,
              OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; the last line that it prints is the result
    process   runs the function in a process of its own for each rollout: for code that blocks or leaves things behind
    seats     it plays several, and names one in X-Session-ID with each call: those that are trained
    scored    False: it may return None, which is a reward of 0
    Returns   (`call`) a number, or a mapping with "reward" and other numbers: `AgentResult`
    Raises    ConfigError for a function that does not take three arguments
    """

    def __init__(
        self,
        name: str | None = None,
        command: Sequence[str] | None = None,
        *,
        process: bool = False,
        scored: bool = True,
        seats: Sequence[str] | None = None,
    ) -> None:
        self._read = partial(AgentResult.of, needed=scored, seats=seats)
        self.by_session = seats is not None  # True: a rollout's calls are of several seats
        self._command = list(command or ())
        self._function: Callable[..., Any] | None = None
        self._runner: AsyncRunner | ThreadRunner | None = None
        if name is not None:
            function = load_function(name, what="agent")
            try:
                inspect.signature(function).bind("base_url", "api_key", {})
            except TypeError as error:
                raise ConfigError(f"agent: {name} must take base_url, api_key and row: {error}.") from None
            if process:
                self._command = [sys.executable, "-m", __spec__.name, name]
            else:
                self._function, self._runner = function, runner_of(function, "agent", 1)

    def call(self, base_url: str, key: str, row: Row, *, timeout_s: float, stopped: Callable[[], bool]) -> Outcome:
        """The outcome of one attempt, with an `AgentResult`; not ``done`` after ``timeout_s`` or if ``stopped``."""
        if self._function is not None:
            calls = Calls([partial(self._function, base_url, key, dict(row))], convert=self._read)
            return self._runner.run(calls, timeout_s=timeout_s)[0]
        try:
            said = _output(self._command, base_url, key, row, time.monotonic() + timeout_s, stopped)
            return Outcome(self._read(said), done=True)
        except DeadlineError:
            return Outcome()
        except (RolloutError, OSError) as error:
            return Outcome(error=f"{type(error).__name__}: {error}", done=True)

    def close(self) -> None:
        """Ends the threads of calls once they return, and cancels coroutines."""
        if self._runner is not None:
            self._runner.close()


def _output(command: Sequence[str], base_url: str, key: str, row: Row, end: float, stopped: Callable[[], bool]) -> Any:
    """What a program printed in its last line, as JSON. Raises DeadlineError, RolloutError."""
    address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key}
    address |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # for functions that this process can import
    # Files, not pipes: a process that the program leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(_as_json(row).encode())
        given.seek(0)
        streams = {"stdin": given, "stdout": out, "stderr": errors}
        environment = {**os.environ, "PYTHONPATH": path, **address}
        process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        try:
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() >= end or stopped():
                    raise DeadlineError("agent: the program was still running.")
                time.sleep(_LOOK_S)
        finally:
            signal_group(process.pid, signal.SIGKILL)  # before it is reaped: also what it has left behind
            process.wait()
        said, complaints = (_text(stream) for stream in (out, errors))
    if process.returncode:
        raise RolloutError(f"agent: {command[0]} ended with {process.returncode}: {complaints[-_SHOWN:].strip()}")
    last = said.strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        raise RolloutError(
            f"agent: the last line that {command[0]} prints must be a number or a JSON object: got {last!r:.200}; "
            f"its errors: {complaints[-_SHOWN:].strip() or 'none'}"
        ) from None


def _as_json(row: Row) -> str:
    parts = []
    for name, value in row.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise RolloutError(
                f"agent: a program gets its row as JSON, which cannot hold the column {name!r}: {error}; leave the "
                "column out, or name a function, which gets the row as it is."
            ) from None
    return "{" + ", ".join(parts) + "}"


def _text(stream: Any) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _main(name: str) -> None:
    """Calls the function ``name`` with what `_output` gives to a program."""
    function, row = load_function(name, what="agent"), json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # the last line is the result
        value = function(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
        if inspect.isawaitable(value):
            import asyncio

            value = asyncio.run(_awaited(value))
    print(json.dumps(dict(value) if isinstance(value, Mapping) else value, default=float), flush=True)


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    _main(sys.argv[1])
