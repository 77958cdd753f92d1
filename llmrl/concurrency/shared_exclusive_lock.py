"""``Gate``: who may be inside an engine at the same time. Requests share it; new weights have it to themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from llmrl.errors import DeadlineError

__all__ = ["Gate"]


class Gate:
    """Lets those in together who come with equal keys, in the order in which they come.

    Whoever finds others with another key inside, or waiting, waits behind them: a stream of requests never keeps an
    update out. A key of one's own (``object()``) is to be alone. A thread must not come twice.

    >>> gate = Gate()
    >>> with gate.holding("request", time.monotonic() + 1, "generating"):
    ...     gate.num_inside
    1
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []  # in the order of arrival
        self._key: Hashable = None
        self.num_inside = 0

    @contextmanager
    def holding(
        self, key: Hashable, end: float, phase: str, when_waiting: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Inside the block. ``when_waiting`` is called where others have to be waited for, once nobody new comes in.

        Raises  DeadlineError, naming ``phase``, where that cannot begin by ``end``
        """
        ticket = _Ticket(key)
        with self._changed:
            self._waiting.append(ticket)
            must_wait = not self._may_enter(ticket)
        try:
            if must_wait and when_waiting is not None:
                when_waiting()
            self._enter(ticket, end, phase)
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.num_inside -= 1
                self._changed.notify_all()

    def _enter(self, ticket: _Ticket, end: float, phase: str) -> None:
        with self._changed:
            while not self._may_enter(ticket):
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"VLLMEngine: {phase} must begin before its deadline: {self.num_inside} other calls were still "
                        "under way."
                    )
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._key = ticket.key
            self.num_inside += 1

    def _may_enter(self, ticket: _Ticket) -> bool:
        if self.num_inside and self._key != ticket.key:
            return False
        ahead = self._waiting[: self._waiting.index(ticket)]
        return all(other.key == ticket.key for other in ahead)


class _Ticket:
    def __init__(self, key: Hashable) -> None:
        self.key = key
