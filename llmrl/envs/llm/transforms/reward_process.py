"""`ProcessRunner`: calls a reward function in a process that is killed at the deadline.

This file is also the script of that process, which imports no torch and loads the function by its name.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llmrl.concurrency.deadline import Calls, Outcome, runner_of
from llmrl.errors import ConfigError, DeadlineError, WorkerError

FAILED = "failed\0"  # begins the message of a row that failed
SHOWN = ": "  # separates the type of a value from its repr


class ProcessRunner:
    """Calls the function with the import name ``function`` in another process, ``concurrency`` calls at a time.

    The calls are partials of that function. If the process ends during a call, all calls without an outcome fail.
    """

    def __init__(self, name: str, function: str, *, concurrency: int, batched: bool):
        from llmrl.concurrency.worker_process import WAIT_S, WorkerPool

        self.name = name
        self.concurrency = concurrency
        settings = [function, concurrency, batched]
        size = min(4, os.cpu_count() or 1)  # environments that can score at the same time
        self._wait_s = WAIT_S
        self._pool = WorkerPool(Path(__file__), [json.dumps(settings)], size=size, who=f"RewardFunction {name!r}")

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, once all calls are done or after ``timeout_s`` seconds, without the start of the process."""
        if not calls.calls:
            return []
        # Results arrive one by one: if the process crashes or hangs, only the calls without a result are lost.
        left = set(range(len(calls.calls)))
        arguments = [(call.args, call.keywords) for call in calls.calls]
        with self._pool.worker(math.inf if timeout_s is None else self._wait_s + timeout_s) as worker:
            try:
                for number, value, error, retried in worker.ask([arguments, calls.retries], timeout_s):
                    calls.finish(number, Outcome(value, error, done=True))
                    calls.retried = retried
                    left.discard(number)
            except DeadlineError:
                worker.stop()
            except WorkerError as error:
                worker.stop()
                text = f"{error} Row {min(left) + 1} of {len(calls.calls)} was the first without a value."
                for number in left:
                    calls.finish(number, Outcome(error=text, done=True))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigError(
                    f"RewardFunction {self.name!r}: its arguments must be picklable, to be sent to another "
                    f"process: {error}; set process to false."
                ) from error
        return calls.close()

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()


def plain_number(value: Any) -> float | str | None:
    """A returned value as a number or None; for anything else a string with its type and repr. An exception, which a
    function of several rows returns for one that failed, is a string that begins with ``FAILED``.
    """
    if value is None:
        return None
    if isinstance(value, Exception):
        return f"{FAILED}{type(value).__name__}: {value}"
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        if not isinstance(value, (str, bytes)):
            try:
                return float(value)
            except OverflowError:  # an integer with hundreds of digits
                return math.inf
    if inspect.iscoroutine(value):
        value.close()
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}{SHOWN}{value!r:.60}"


def plain_numbers(values: Any) -> list[float | str | None] | str:
    """`plain_number` of each value; the type as a string if ``values`` is not iterable."""
    try:
        return [plain_number(value) for value in values]
    except TypeError:
        return f"a {type(values).__name__}"


def _serve() -> None:
    from llmrl.concurrency.worker_process import serve
    from llmrl.loading import load_function

    function, concurrency, batched = json.loads(sys.argv[1])
    fn = load_function(function, what="reward")
    runner = runner_of(fn, "reward", concurrency)

    def handle(request: Any, reply: Callable[[Any], None]) -> None:
        def on_outcome(number: int, outcome: Outcome) -> None:
            reply([number, outcome.value, outcome.error, calls.retried])

        arguments, retries = request
        convert = plain_numbers if batched else plain_number
        rows = [partial(fn, *args, **named) for args, named in arguments]
        calls = Calls(rows, retries, convert=convert, on_outcome=on_outcome)
        runner.run(calls, timeout_s=None)

    serve(handle)
    if callable(close := getattr(fn, "close", None)):
        close()


if __name__ == "__main__":
    _serve()
