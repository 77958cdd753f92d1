"""Shared/exclusive FIFO lock with deadlines: requests share it, weight updates hold it exclusively."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from llmrl.errors import DeadlineError


class SharedExclusiveLock:
    """Holders with equal keys share the lock; a unique key (``object()``) makes an exclusive holder.

    Access is granted in the order of arrival, so a stream of shared holders never starves an exclusive one. A thread
    must not acquire it twice.

    >>> lock = SharedExclusiveLock("Engine")
    >>> with lock.holding("request", time.monotonic() + 1, "generating"):
    ...     lock.num_holders
    1
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._changed = threading.Condition()
        self._waiting: list[list[Hashable]] = []  # in order of arrival: [key], compared by identity
        self._key: Hashable = None
        self.num_holders = 0

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait for the lock."""
        return len(self._waiting)

    @contextmanager
    def holding(
        self, key: Hashable, end: float, phase: str, when_waiting: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Holds the lock inside the block. If the lock is not free, calls ``when_waiting`` once this thread is in the
        queue, so that later arrivals already queue behind it.

        Raises  DeadlineError, naming ``phase``, if the lock is not granted by ``end`` (of `time.monotonic`)
        """
        ticket = [key]
        with self._changed:
            self._waiting.append(ticket)  # before the hook is called: later arrivals queue behind it
            must_wait = not self._is_granted(ticket)
        try:
            if must_wait and when_waiting is not None:
                when_waiting()
            with self._changed:
                while not self._is_granted(ticket):  # woken at every change, by any thread
                    left = end - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(
                            f"{self._who}: {phase} must begin before its deadline: {self.num_holders} other calls were "
                            "still in flight."
                        )
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                self._key = key
                self.num_holders += 1
        finally:
            with self._changed:  # also after the deadline, or later tickets would wait behind this one forever
                self._waiting = [other for other in self._waiting if other is not ticket]
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.num_holders -= 1
                self._changed.notify_all()

    def _is_granted(self, ticket: list[Hashable]) -> bool:
        if self.num_holders and self._key != ticket[0]:
            return False
        # First in, first out: a ticket is granted if all tickets before it have an equal key.
        for other in self._waiting:
            if other is ticket:
                return True
            if other != ticket:
                return False
        raise AssertionError("a ticket is in the queue until it is granted or its deadline has passed")
