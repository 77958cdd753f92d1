"""A pool of daemon threads without a size limit: a call reuses an idle thread or starts a new one."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_IDLE_S = 60.0  # an idle thread ends after this time


class DaemonThreads:
    """Calls functions in threads. A function that never returns blocks its own thread only, and no other call.

    A forked process starts its own threads.

    >>> answers, threads = queue.SimpleQueue(), DaemonThreads("example")
    >>> threads.start(lambda: answers.put("done"))
    >>> answers.get(timeout=10)
    'done'
    >>> threads.close()
    """

    def __init__(self, name: str):
        self._name = name
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = 0  # idle threads minus queued calls

    def start(self, call: Callable[[], object]) -> None:
        """Starts the call and returns; its result is ignored."""
        if self._process != os.getpid():  # after a fork: the threads are the parent's, and the lock may be held
            self._reset()
        with self._lock:
            if self._idle:  # decremented here, not by the thread: two calls never rely on the same idle thread
                self._idle -= 1
                self._calls.put(call)
                return
        threading.Thread(target=self._serve, args=[call], name=self._name, daemon=True).start()

    def close(self) -> None:
        """Ends idle threads now, and busy ones after their calls."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _serve(self, call: Callable[[], object] | None) -> None:
        while call is not None:
            call()
            call = None  # frees the objects that it refers to: the thread may be idle for a long time
            with self._lock:
                if self._closed:
                    return
                self._idle += 1
            call = self._next()

    def _next(self) -> Callable[[], object] | None:
        while True:
            try:
                return self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle:  # otherwise a call for this thread is being queued
                        self._idle -= 1
                        return None
