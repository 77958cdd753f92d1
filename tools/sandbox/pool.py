"""Interpreters for many conversations: started ahead of time, kept while a conversation lasts, bounded in number."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from llmrl.errors import ConfigError, DeadlineError
from llmrl.tools.sandbox.launch import Sandbox
from llmrl.tools.sandbox.session import Execution, Session

_LOG = logging.getLogger(__name__)
_START_S = 30.0  # for an interpreter to start on a busy machine
_CLOSE_S = 5.0  # for running calls to end
_REAP_S = 60.0  # for thousands of processes to exit on a busy machine


class InterpreterPool:
    """Runs code in one interpreter per conversation, which keeps what the code defines.

    At least ``spare`` interpreters are kept ready, and enough to reach the highest number in use so far, so that a
    batch of new conversations need not wait for starts. At most ``max_interpreters`` are in use: beyond that the
    longest idle one is killed, and its conversation's next result says so. Nothing is started before the first call.

    >>> pool = InterpreterPool(Sandbox("subprocess"))
    >>> deadline = time.monotonic() + 30
    >>> pool.run("x = 6", conversation="a", deadline=deadline).status
    'ok'
    >>> pool.run("x * 7", conversation="a", deadline=deadline).output
    '42\\n'
    >>> pool.close()
    """

    def __init__(self, sandbox: Sandbox, *, spare: int = 1, max_interpreters: int = 64):
        if max_interpreters < 1 or not 0 <= spare <= max_interpreters:
            raise ConfigError(
                f"InterpreterPool: must have 0 <= spare <= max_interpreters and max_interpreters >= 1: got "
                f"spare={spare}, max_interpreters={max_interpreters}."
            )
        self.sandbox = sandbox
        self.spare = spare
        self.max_interpreters = max_interpreters
        self.counters = {"started": 0, "evicted": 0, "killed": 0}
        self._changed = threading.Condition()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()  # least recently used first
        self._ready: deque[Session | Exception] = deque()  # started and unused interpreters, or start errors
        self._killed: list[Session] = []  # not yet reaped
        self._in_use = 0
        self._peak = 0
        self._waiting = 0  # calls that wait for a start
        self._closed = False
        self._launcher: threading.Thread | None = None
        self._process = os.getpid()

    def run(self, code: str, *, conversation: Hashable, deadline: float, fresh: bool = False) -> Execution:
        """Runs the code in the conversation's interpreter; with None, in an interpreter for this call only.

        ``fresh`` runs it in a separate process. Calls of one conversation run one after another.

        Raises   SessionError if no interpreter could be started, DeadlineError if none was free in time
        """
        with self._slot(conversation) as slot:
            if not slot.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise DeadlineError("InterpreterPool: the call before it in the conversation did not end in time.")
            try:
                if slot.session is None:
                    self._fill(slot, deadline)
                # Reported once, with the first result of the new interpreter.
                lost, slot.lost = slot.lost, None
                result = slot.session.run(code, deadline=deadline, fresh=fresh)
                if not slot.session.alive:
                    self._empty(slot)
                return replace(result, lost_before=lost)
            finally:
                slot.lock.release()

    def end(self, conversation: Hashable) -> None:
        """Kills the interpreter of a finished conversation."""
        with self._changed:
            slot = self._slots.pop(conversation, None)
            if slot is not None:
                slot.ended = True
                if slot.users == 0:
                    self._empty(slot)

    def close(self) -> None:
        """Kills every interpreter and waits, at most a minute, until all calls and their processes have ended."""
        with self._changed:
            self._closed = True
            for slot in self._slots.values():
                if slot.users == 0:
                    self._empty(slot)
                elif slot.session is not None:
                    slot.session.terminate()  # its call ends, and empties the slot
            while self._ready:
                self._kill(self._ready.popleft())
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_use, _CLOSE_S)
            launcher = self._launcher
        if launcher is not None and launcher is not threading.current_thread():
            launcher.join(timeout=_REAP_S)
            if launcher.is_alive():
                left = [session.process.pid for session in self._killed]
                _LOG.warning("interpreter pool: processes %s still run %g s after they were killed", left, _REAP_S)

    @contextlib.contextmanager
    def _slot(self, conversation: Hashable) -> Iterator[_Slot]:
        # A call without a conversation gets its own, which ends with the call.
        key = object() if conversation is None else conversation
        with self._changed:
            if self._closed:
                raise ConfigError("InterpreterPool: must not be closed: got a call after close().")
            if self._launcher is not None and self._process != os.getpid():
                raise ConfigError("InterpreterPool: must be made after a fork: got a call in a forked process.")
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            slot.users += 1
        try:
            yield slot
        finally:
            with self._changed:
                slot.users -= 1
                if conversation is None:
                    self.end(key)
                elif slot.users == 0 and (slot.ended or self._closed):
                    self._empty(slot)
                self._changed.notify_all()

    def _fill(self, slot: _Slot, deadline: float) -> None:
        with self._changed:
            self._wait(self._has_room, deadline, f"all {self.max_interpreters} interpreters were busy with other calls")
            # Counted before it has started, so that concurrent calls cannot exceed the limit.
            self._in_use += 1
            self._peak = max(self._peak, self._in_use)
            self._waiting += 1
            self._notify_launcher()
            session: Session | Exception | None = None
            try:
                self._wait(lambda: self._ready, deadline, "no interpreter was started")
                session = self._ready.popleft()
                if isinstance(session, Exception):
                    raise session
            except BaseException:
                self._in_use -= 1
                raise
            finally:
                self._waiting -= 1
        try:
            session.wait_ready(min(deadline, time.monotonic() + _START_S))
            with self._changed:  # `close` kills only interpreters that are in slots
                self._check_open()
                slot.session = session
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._kill(session)
            raise

    def _has_room(self) -> bool:
        """True if one more interpreter may be in use; kills the longest idle one if necessary."""
        if self._in_use >= self.max_interpreters:
            idle = next((slot for slot in self._slots.values() if slot.users == 0 and slot.session), None)
            if idle is None:
                return False
            idle.lost = "others needed its place"
            self.counters["evicted"] += 1
            self._empty(idle)
        return True

    def _wait(self, condition: Callable[[], Any], deadline: float, problem: str) -> None:
        """Waits until ``condition()`` holds; the caller holds the lock. Raises DeadlineError."""
        timeout_s = max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
        if not self._changed.wait_for(lambda: self._closed or condition(), timeout_s):
            raise DeadlineError(f"InterpreterPool: {problem} in time.")
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise DeadlineError("InterpreterPool: was closed while a call was waiting.")

    def _empty(self, slot: _Slot) -> None:
        with self._changed:
            if slot.session is not None:
                self._kill(slot.session)
                slot.session = None
                self._in_use -= 1
                self.counters["killed"] += 1
                self._changed.notify_all()

    def _kill(self, session: Session | Exception) -> None:
        if isinstance(session, Session):
            session.kill()
            self._killed.append(session)

    def _notify_launcher(self) -> None:
        if self._launcher is None:
            self._process = os.getpid()
            self._launcher = threading.Thread(target=self._launch, name="interpreter pool", daemon=True)
            self._launcher.start()
        self._changed.notify_all()

    def _launch(self) -> None:
        """Starts and reaps interpreters in one thread, because they end with the thread that started them."""
        while True:
            with self._changed:
                self._killed = [session for session in self._killed if not session.reaped()]
                if self._closed and not self._killed and not self._in_use:
                    return
                kept = min(max(self.spare, self._peak - self._in_use), self.max_interpreters - self._in_use)
                if self._closed or len(self._ready) >= self._waiting + kept:  # each waiting call takes one
                    self._changed.wait(0.01 if self._killed or self._closed else None)
                    continue
            try:
                session: Session | Exception = self.sandbox.start()
            except Exception as error:
                session = error
            with self._changed:
                if self._closed:
                    self._kill(session)
                else:
                    self._ready.append(session)
                    self.counters["started"] += 1
                self._changed.notify_all()


@dataclass(eq=False)
class _Slot:
    """A conversation and its current interpreter, if any."""

    session: Session | None = None
    lost: str | None = None  # why its interpreter is gone, for its next result
    users: int = 0  # running or waiting calls
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
