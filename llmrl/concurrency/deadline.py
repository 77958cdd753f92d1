"""Runs users' functions, in threads or as coroutines, with one deadline for all and an outcome for each.

Python cannot stop a thread: a call that never returns keeps its daemon thread, and its result is dropped. A call that
never releases the GIL stops every thread; `watch_lock` then ends the process and prints the stack of each thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmrl.concurrency.daemon_threads import DaemonThreads

GRACE_S = 1.0  # for coroutines to notice that they are cancelled
STUCK_S = 60.0  # after a deadline, for any thread to run at all
_watched: dict[object, float] = {}  # latest end of each watched call, of `time.monotonic`
_watched_lock = threading.Lock()
_fires_at = 0.0  # time at which the timer ends this process, of `time.monotonic`; 0: not running


@dataclass
class Outcome:
    """The result of one call: ``done`` with a value or with an error's traceback, or not done in time."""

    value: Any = None
    error: str | None = None
    done: bool = False


class Calls:
    """Calls without arguments, taken in order; a call that raises is retried up to ``retries`` times.

    ``convert`` maps a call's return value to the outcome's value. ``on_outcome`` receives the index and the outcome of
    each call, in the thread that made it. After ``close`` no call is started and no outcome changes.
    """

    def __init__(
        self,
        calls: list[Callable[[], Any]],
        retries: int = 0,
        *,
        convert: Callable[[Any], Any] = lambda value: value,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ):
        self.calls = calls
        self.retries = retries
        self.retried = 0
        self.finished = threading.Event()
        self._convert, self._on_outcome = convert, on_outcome
        self._outcomes = [Outcome() for _ in calls]
        self._lock = threading.Lock()
        self._next = 0
        self._left = len(calls)
        self._closed = False

    def run(self) -> None:
        """Makes calls until there are none left."""
        for call, attempt in self._attempts():
            with attempt:
                attempt.value = self._convert(call())

    async def run_async(self) -> None:
        """`run` for calls that return awaitables."""
        for call, attempt in self._attempts():
            with attempt:
                attempt.value = self._convert(await call())

    def close(self) -> list[Outcome]:
        """The final outcomes of all calls."""
        with self._lock:
            self._closed = True
            return self._outcomes

    def finish(self, number: int, outcome: Outcome) -> None:
        """Records the outcome of a call, whether or not `run` made it."""
        if self._on_outcome is not None:
            self._on_outcome(number, outcome)
        with self._lock:
            if self._closed:  # too late: the caller has the outcomes already
                return
            self._outcomes[number] = outcome
            self._left -= 1
            if self._left == 0:
                self.finished.set()

    def _attempts(self) -> Iterator[tuple[Callable[[], Any], _Attempt]]:
        # Shared by `run` and `run_async`, which differ in one await; they fill in each attempt that this yields.
        while (number := self._take()) is not None:
            for left in reversed(range(self.retries + 1)):
                attempt = _Attempt(done=True)
                yield self.calls[number], attempt
                if attempt.error is None or not left or not self._retry():
                    self.finish(number, attempt)
                    break

    def _take(self) -> int | None:
        with self._lock:
            if self._closed or self._next == len(self.calls):
                return None
            self._next += 1
            return self._next - 1

    def _retry(self) -> bool:
        with self._lock:
            self.retried += not self._closed
            return not self._closed


class _Attempt(Outcome):
    """The outcome of one attempt at a call, as a context manager that records an error of the user's code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if isinstance(error, Exception | SystemExit):  # sys.exit() in a reward must not end the run
            from llmrl.loading import user_traceback

            self.error = user_traceback(error)
            return True
        return False


class ThreadRunner:
    """Makes calls in ``concurrency`` threads; in the caller's thread if concurrency is 1 and there is no deadline.

    >>> runner = ThreadRunner("example", concurrency=2)
    >>> [outcome.value for outcome in runner.run(Calls([lambda: 1, lambda: 2]), timeout_s=10)]
    [1, 2]
    >>> runner.close()
    """

    def __init__(self, name: str, concurrency: int = 1):
        self.name = name
        self.concurrency = concurrency
        self._threads = DaemonThreads(name)

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, once all calls are done or ``timeout_s`` seconds have passed."""
        if not calls.calls:
            return []
        if timeout_s is None and self.concurrency == 1:
            calls.run()
            return calls.close()
        with _lock_watched(timeout_s):
            for _ in range(min(self.concurrency, len(calls.calls))):
                self._threads.start(calls.run)
            calls.finished.wait(timeout_s)
        return calls.close()

    def close(self) -> None:
        """Ends the threads once their calls return."""
        self._threads.close()


class AsyncRunner:
    """Makes calls that return awaitables, at most ``concurrency`` at a time, in the process's event loop for users.

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
        self._renew()

    def _renew(self) -> None:
        from llmrl.concurrency.background_loop import UserLoop

        self._loop = UserLoop(self.name)

    def run(self, calls: Calls, *, timeout_s: float | None) -> list[Outcome]:
        """The outcomes, once all calls are done or ``timeout_s`` seconds have passed; late calls are cancelled."""
        if not calls.calls:
            return []
        limit = float("inf") if timeout_s is None else time.monotonic() + timeout_s + 2 * GRACE_S
        with contextlib.suppress(TimeoutError), _lock_watched(timeout_s):  # late: a coroutine blocks the loop
            self._loop.run(self._all(calls, timeout_s), deadline=limit)
        return calls.close()

    def close(self) -> None:
        """Cancels the calls that are running; `run` may be called again."""
        self._loop.close()
        self._renew()

    async def _all(self, calls: Calls, timeout_s: float | None) -> None:
        workers = [asyncio.ensure_future(calls.run_async()) for _ in range(min(self.concurrency, len(calls.calls)))]
        try:
            _, late = await asyncio.wait(workers, timeout=timeout_s)
            if late:
                calls.close()  # first: a coroutine that catches its cancellation must not begin another call
                for worker in late:
                    worker.cancel()
                await asyncio.wait(late, timeout=GRACE_S)
        except asyncio.CancelledError:  # by `close`
            calls.close()
            for worker in workers:
                worker.cancel()
            raise


def runner_of(fn: Callable[..., Any], name: str, concurrency: int) -> AsyncRunner | ThreadRunner:
    """An `AsyncRunner` if ``fn`` is a coroutine function, else a `ThreadRunner`."""
    return (AsyncRunner if is_coroutine_function(fn) else ThreadRunner)(name, concurrency)


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """True for a coroutine function, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


@contextlib.contextmanager
def _lock_watched(timeout_s: float | None) -> Iterator[None]:
    key = object()
    watch_lock(key, None if timeout_s is None else time.monotonic() + timeout_s)
    try:
        yield
    finally:
        watch_lock(key, None)


def watch_lock(key: object, deadline: float | None) -> None:
    """Ends this process if none of its Python threads runs for at least `STUCK_S` seconds after the deadline. A
    deadline of None ends the watch of ``key``.

    C code that holds the GIL stops all Python threads, so the timer must be in C too: that of `faulthandler`, one per
    process, which also prints the stack of each thread.
    """
    with _watched_lock:
        if deadline is None:
            _watched.pop(key, None)
            return
        _watched[key] = deadline + STUCK_S
        end = max(_watched.values())  # one timer for all calls: it follows the latest
        if not end <= _fires_at <= end + STUCK_S:  # reused for many calls: starting it takes longer than most of them
            if not _fires_at:
                threading.Thread(target=_keep_timer, name="llmrl-lock-watch", daemon=True).start()
            _start_timer(end + STUCK_S / 2)


def _start_timer(fires_at: float) -> None:
    global _fires_at
    _fires_at = fires_at
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stderr to write to
        faulthandler.dump_traceback_later(fires_at - time.monotonic(), exit=True, file=sys.__stderr__)


def _keep_timer() -> None:
    """Postpones the timer: if this thread runs, no call holds the GIL forever. Stops the timer after the last call."""
    global _fires_at
    while True:
        time.sleep(STUCK_S / 60)
        with _watched_lock:
            if not _watched:
                faulthandler.cancel_dump_traceback_later()
                _fires_at = 0.0
                return
            if _fires_at < (now := time.monotonic()) + STUCK_S / 2:
                _start_timer(now + STUCK_S)


def _before_fork() -> None:
    """Stops the timer: a child forked while it runs would wait forever for the timer's thread, even at exit."""
    _watched_lock.acquire()  # held across the fork: the child must not inherit a lock that another thread holds
    if _fires_at:
        faulthandler.cancel_dump_traceback_later()


def _after_fork_in_parent() -> None:
    if _fires_at:
        _start_timer(_fires_at)
    _watched_lock.release()


def _after_fork_in_child() -> None:
    """Clears the watched calls, which are the parent's."""
    global _fires_at
    _fires_at = 0.0
    _watched.clear()
    _watched_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
