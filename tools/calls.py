"""Runs calls of a user's function, in threads or as coroutines, with one deadline for all and an outcome for each.

What is called and what the outcomes mean is the caller's part. A call that never returns is left behind: Python cannot
stop a thread, but nothing that it does later is looked at, and the process can end all the same. One that keeps the
interpreter's lock stops every thread: a minute after the deadline the process ends, and says where it stood.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from llmrl.concurrency.background_loop import BackgroundLoop

__all__ = ["AsyncRunner", "Calls", "Outcome", "ThreadRunner", "watch_lock"]

GRACE_S = 1.0  # for coroutines to notice that they are cancelled
STUCK_S = 60.0  # after a deadline, for any thread to run at all
_watched: dict[object, float] = {}  # what is waited for in this process, and until when, of `time.monotonic`
_watched_lock = threading.Lock()


@dataclass
class Outcome:
    """What came of one call: ``done`` with a value or an error's traceback, or not done in time."""

    value: Any = None
    error: str | None = None
    done: bool = False


class Calls:
    """Calls without arguments, taken in order; one that raises is tried ``retries`` times more.

    ``convert`` makes an outcome's value of what a call returned; ``told`` hears of each outcome, in the thread that
    made the call. After ``close`` no call is started and no outcome changes.
    """

    def __init__(
        self,
        calls: list[Callable[[], Any]],
        retries: int = 0,
        *,
        convert: Callable[[Any], Any] | None = None,
        told: Callable[[int, Outcome], None] | None = None,
    ):
        self.calls = calls
        self.retries = retries
        self._convert, self._told = convert, told
        self.retried = 0
        self.finished = threading.Event()
        self._outcomes = [Outcome() for _ in calls]
        self._lock = threading.Lock()
        self._next = 0
        self._left = len(calls)
        self._closed = False

    def take(self) -> int | None:
        """The number of the next call to make; None where there is none."""
        with self._lock:
            if self._closed or self._next == len(self.calls):
                return None
            self._next += 1
            return self._next - 1

    def run(self) -> None:
        """Makes calls until there are none left."""
        while (number := self.take()) is not None:
            for again in reversed(range(self.retries + 1)):
                try:
                    value = self._converted(self.calls[number]())
                except (Exception, SystemExit):  # the boundary to the user's code
                    if not (again and self._retry()):
                        self.finish(number, Outcome(error=traceback.format_exc(), done=True))
                        break
                else:
                    self.finish(number, Outcome(value, done=True))
                    break

    async def run_async(self) -> None:
        """`run` for calls that return awaitables."""
        while (number := self.take()) is not None:
            for again in reversed(range(self.retries + 1)):
                try:
                    value = self._converted(await _awaitable(self.calls[number]))
                except (Exception, SystemExit):
                    if not (again and self._retry()):
                        self.finish(number, Outcome(error=traceback.format_exc(), done=True))
                        break
                else:
                    self.finish(number, Outcome(value, done=True))
                    break

    def close(self) -> list[Outcome]:
        """What came of the calls by now, for good."""
        with self._lock:
            self._closed = True
            return self._outcomes

    def _retry(self) -> bool:
        with self._lock:
            self.retried += not self._closed
            return not self._closed

    def _converted(self, value: Any) -> Any:
        return value if self._convert is None else self._convert(value)

    def finish(self, number: int, outcome: Outcome) -> None:
        """Says what came of a call that was taken, or made elsewhere."""
        if self._told is not None:
            self._told(number, outcome)
        with self._lock:
            if self._closed:
                return
            self._outcomes[number] = outcome
            self._left -= 1
            if self._left == 0:
                self.finished.set()


class ThreadRunner:
    """Makes calls in ``concurrency`` threads, or in the calling one where there is nothing to gain from others.

    >>> runner = ThreadRunner("example", concurrency=2)
    >>> [outcome.value for outcome in runner.run(Calls([lambda: 1, lambda: 2]), timeout_s=10)]
    [1, 2]
    >>> runner.close()
    """

    def __init__(self, name: str, concurrency: int = 1):
        self.name = name
        self.concurrency = concurrency
        self._workers: list[_Worker] = []

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, after all calls were made or ``timeout_s`` seconds."""
        if not calls.calls:
            return []
        if timeout_s is None and self.concurrency == 1:
            calls.run()
            return calls.close()
        while len(self._workers) < min(self.concurrency, len(calls.calls)):
            self._workers.append(_Worker(self.name))
        with _lock_watched(timeout_s):
            for worker in self._workers:
                worker.start(calls.run)
            in_time = calls.finished.wait(timeout_s)
        outcomes = calls.close()
        if not in_time:
            self.close()  # threads end once their calls return; which ones hang cannot be told
        return outcomes

    def close(self) -> None:
        """Lets the threads end."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class AsyncRunner:
    """Makes calls that return awaitables, at most ``concurrency`` at a time, in one event loop that it keeps.

    >>> async def one():
    ...     return 1
    >>> runner = AsyncRunner("example", concurrency=8)
    >>> [outcome.value for outcome in runner.run(Calls([one, one]), timeout_s=10)]
    [1, 1]
    >>> runner.close()
    """

    def __init__(self, name: str, concurrency: int):
        self.name = name
        self.concurrency = concurrency
        self._loop: BackgroundLoop | None = None

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, after all calls were made or ``timeout_s`` seconds; those that are late are cancelled."""
        if not calls.calls:
            return []
        if self._loop is None:
            self._loop = BackgroundLoop(self.name)
        limit = float("inf") if timeout_s is None else time.monotonic() + timeout_s + 2 * GRACE_S
        try:
            with _lock_watched(timeout_s):
                self._loop.run(self._all(calls, timeout_s), deadline=limit)
        except TimeoutError:  # a coroutine that blocks the loop: another loop for the calls to come
            self._loop = None
        return calls.close()

    def close(self) -> None:
        """Ends the loop."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    async def _all(self, calls: Calls, timeout_s: float | None) -> None:
        workers = [asyncio.ensure_future(calls.run_async()) for _ in range(min(self.concurrency, len(calls.calls)))]
        _, late = await asyncio.wait(workers, timeout=timeout_s)
        if late:
            calls.close()
            for worker in late:
                worker.cancel()
            await asyncio.wait(late, timeout=GRACE_S)


class _Worker:
    """One daemon thread that runs what it is given in turn."""

    def __init__(self, name: str):
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def start(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


async def _awaitable(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


@contextlib.contextmanager
def _lock_watched(timeout_s: float | None) -> Iterator[None]:
    key = object()
    watch_lock(key, None if timeout_s is None else time.monotonic() + timeout_s)
    try:
        yield
    finally:
        watch_lock(key, None)


def watch_lock(key: object, deadline: float | None) -> None:
    """Ends this process where no thread of it runs for `STUCK_S` seconds after the deadline; with None, no more.

    Only C code that keeps the interpreter's lock does that, and only C code can notice: the timer of `faulthandler`, of
    which there is one for all that is waited for. It writes where each thread stands.
    """
    with _watched_lock:
        if deadline is not None:
            _watched[key] = deadline + STUCK_S
        elif _watched.pop(key, None) is None:
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stderr to write to
            if _watched:
                left = max(_watched.values()) - time.monotonic()
                faulthandler.dump_traceback_later(max(left, STUCK_S), exit=True, file=sys.__stderr__)
            else:
                faulthandler.cancel_dump_traceback_later()
