"""`ProcessRunner`: makes the calls of a reward function in a process that is killed at the deadline.

The same file is the process's script: there it imports no torch, and the function by its name.
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
from llmrl.concurrency.worker_process import WAIT_S, WorkerPool, serve
from llmrl.errors import ConfigError, DeadlineError, WorkerError
from llmrl.loading import load_function

SHOWN = ": "  # between the type of a value and how it looks


class ProcessRunner:
    """Makes calls of the function that ``function`` names, ``concurrency`` at a time, outside of this process.

    The calls are partials of that function. Where the process ends in a call, those that have no outcome yet failed.
    """

    def __init__(self, name: str, function: str, *, concurrency: int, batched: bool):
        self.name = name
        self.concurrency = concurrency
        settings = [function, concurrency, batched]
        size = min(4, os.cpu_count() or 1)  # of environments that score at the same time
        self._pool = WorkerPool(Path(__file__), [json.dumps(settings)], size=size, who=f"RewardFunction {name!r}")

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, after all calls were made or ``timeout_s`` seconds; starting the process does not count."""
        if not calls.calls:
            return []
        # Answers come one by one, so that a process that dies or hangs takes only the calls with it that have none.
        left = set(range(len(calls.calls)))
        arguments = [(call.args, call.keywords) for call in calls.calls]
        with self._pool.worker(math.inf if timeout_s is None else WAIT_S + timeout_s) as worker:
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
                    f"RewardFunction {self.name!r}: what it is called with must be of a kind that can go to another "
                    f"process: {error}; set process to false."
                ) from error
        return calls.close()

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()


def plain_number(value: Any) -> float | str | None:
    """A returned value as a number or None; for anything else its type and how it looks, which JSON can write."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        if not isinstance(value, (str, bytes)):
            try:
                return float(value)
            except OverflowError:  # a whole number of hundreds of digits
                return math.inf
    if inspect.iscoroutine(value):
        value.close()
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}{SHOWN}{value!r:.60}"


def plain_numbers(values: Any) -> list[float | str | None] | str:
    """`plain_number` of each; for what is not several values, its type."""
    try:
        return [plain_number(value) for value in values]
    except TypeError:
        return f"a {type(values).__name__}"


def _serve() -> None:
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
