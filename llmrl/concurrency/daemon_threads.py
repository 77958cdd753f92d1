"""A pool of daemon threads without a size limit: a call reuses an idle thread or starts a new one."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

_IDLE_S = 60.0  # an idle thread ends after this time
_ENDING_S = 0.2


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
        self._alive: set[threading.Thread] = set()

    def start(self, call: Callable[[], object]) -> None:
        """Starts the call and returns; its result is ignored."""
        if self._process != os.getpid():  # after a fork: the threads are the parent's, and the lock may be held
            self._reset()
        with self._lock:
            if self._idle:  # decremented here, not by the thread: two calls never rely on the same idle thread
                self._idle -= 1
                self._calls.put(call)
                return
            thread = threading.Thread(target=self._serve, args=[call], name=self._name, daemon=True)
            self._alive.add(thread)
            thread.start()

    def close(self, wait_s: float = _ENDING_S) -> None:
        """Ends idle threads now, and busy ones after their calls, for which it waits at most ``wait_s`` seconds.

        The wait is for a call that is done but still holds tensors: a thread that frees them while the interpreter
        exits aborts the process.
        """
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0
            waiting = self._alive - {threading.current_thread()}
        end = time.monotonic() + wait_s
        for thread in waiting:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self, call: Callable[[], object] | None) -> None:
        try:
            while call is not None:
                call()
                call = None  # frees the objects that it refers to: the thread may be idle for a long time
                with self._lock:
                    if self._closed:
                        return
                    self._idle += 1
                call = self._next()
        finally:
            with self._lock:
                self._alive.discard(threading.current_thread())

    def _next(self) -> Callable[[], object] | None:
        while True:
            try:
                return self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle:  # otherwise a call for this thread is being queued
                        self._idle -= 1
                        return None
