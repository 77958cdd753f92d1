"""Event loops in threads of their own, in which blocking code runs coroutines with a deadline.

All coroutines of users run in one loop of the process (`UserLoop`): a client or semaphore at module level is bound to
the loop that first waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from llmrl.errors import LLMRLError

T = TypeVar("T")
ANSWER_S = 1.0


class BackgroundLoop(contextlib.AbstractContextManager):
    """Runs coroutines for any number of threads in one loop, so that they can share clients that are bound to a loop.

    The loop's thread is a daemon. It starts with the first coroutine and ends with ``close``.

    >>> with BackgroundLoop("example") as loop:
    ...     loop.run(asyncio.sleep(0, "done"), deadline=time.monotonic() + 5)
    'done'
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._running: set[Future[Any]] = set()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Waits for the result; at the deadline (of `time.monotonic`) cancels it and raises TimeoutError."""
        try:
            loop = self._started()
        except BaseException:
            coroutine.close()  # else Python warns that it was never awaited
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running.add(future)
        if self._closed:  # `close` may have looked at the running ones before this one was added
            future.cancel()
        try:
            return future.result(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        except CancelledError:
            raise LLMRLError(f"{self._name}: the event loop was closed while a call was running.") from None
        except BaseException:  # the deadline or Ctrl-C; if the coroutine itself raised, cancelling has no effect
            future.cancel()
            raise
        finally:
            self._running.discard(future)

    def close(self) -> None:
        """Cancels running coroutines and ends the thread; waits for it at most two seconds."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():  # a coroutine of the loop may call this
            thread.join(timeout=2.0)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise LLMRLError(f"{self._name}: is closed.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=[self._loop], name=self._name, daemon=True)
                self._thread.start()
            return self._loop


class UserLoop(BackgroundLoop):
    """The process's event loop for users' coroutines; ``close`` cancels those that this object runs, not the others'.

    A loop that a coroutine blocks past its deadline is replaced, if it does not answer within `ANSWER_S` seconds.
    """

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        try:
            return super().run(coroutine, deadline)
        except TimeoutError:
            if time.monotonic() >= deadline:
                _process.replace_if_blocked()
            raise

    def close(self) -> None:
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise LLMRLError(f"{self._name}: is closed.")
        return _process.loop()


class _ProcessLoop:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._background = BackgroundLoop("llmrl-users-coroutines")

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            return self._background._started()

    def replace_if_blocked(self) -> None:
        asked, answered = self._background, threading.Event()
        asked._started().call_soon_threadsafe(answered.set)
        if not answered.wait(ANSWER_S):
            with self._lock:
                if self._background is asked:  # another thread may have replaced it
                    self._background = BackgroundLoop("llmrl-users-coroutines")


def _new_process_loop() -> None:
    """Also in a forked child, which has no thread of its parent's loop."""
    global _process
    _process = _ProcessLoop()


_new_process_loop()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_process_loop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        # Cancelled tasks get a second to end, so that callers of `run` get an error now and not at their deadlines.
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
