"""Daemon threads that are used again: a call gets an idle one, or else a new one."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_IDLE_S = 60.0  # after which an idle thread ends


class DaemonThreads:
    """Calls functions in threads. A function that never returns keeps its thread, and no other call waits for it.

    A forked process makes its own threads.

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
        self._idle = 0  # threads that wait for a call, less the calls that wait for a thread

    def start(self, call: Callable[[], object]) -> None:
        """Begins the call, which nothing waits for."""
        if self._process != os.getpid():  # after a fork: the threads are the parent's, and its lock may be held
            self._reset()
        with self._lock:
            if self._idle:  # counted down here and not by the thread: two calls never count on one idle thread
                self._idle -= 1
                self._calls.put(call)
                return
        threading.Thread(target=self._serve, args=[call], name=self._name, daemon=True).start()

    def close(self) -> None:
        """Ends idle threads, and each other thread after its call."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _serve(self, call: Callable[[], object] | None) -> None:
        while call is not None:
            call()
            call = None  # frees what it holds, for the thread may be idle for long
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
                    if self._idle:  # otherwise a call is on its way
                        self._idle -= 1
                        return None
