"""Interpreters for many conversations: started ahead of time, kept while a conversation lasts, bounded in number."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from llmrl.errors import ConfigError, DeadlineError
from llmrl.tools.sandbox.launch import Sandbox
from llmrl.tools.sandbox.session import Execution, Session

__all__ = ["InterpreterPool"]

_LOG = logging.getLogger(__name__)
_START_S = 30.0  # for an interpreter to start on a busy machine
_WAS_CLOSED = "InterpreterPool: was closed while a call was waiting."
_END_S = 60.0  # for thousands of processes to end on one


class InterpreterPool:
    """Runs code, each conversation's in an interpreter of its own that keeps what the code defines.

    At least ``spare`` interpreters stand ready, and as many as were in use at once before, so that a batch of new
    conversations does not wait for theirs to start. There are never more than ``max_interpreters`` in use: the
    one that was idle for longest gives way, and its conversation is told. Nothing is started before the first call.

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
        self._spares: deque[Session | BaseException] = deque()
        self._dying: list[Session] = []
        self._in_use = 0
        self._peak = 0
        self._waiting = 0  # calls that need an interpreter and found none ready
        self._closed = False
        self._launcher: threading.Thread | None = None
        self._process = os.getpid()

    def run(self, code: str, *, conversation: Hashable, deadline: float, fresh: bool = False) -> Execution:
        """Runs the code in the conversation's interpreter; None is an interpreter for this call alone.

        ``fresh`` runs it in a process of its own. Calls of one conversation run one after another.

        Raises   SessionError if no interpreter could be started, DeadlineError if none was free in time
        """
        key = object() if conversation is None else conversation
        slot = self._enter(key)
        try:
            if not slot.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise DeadlineError("InterpreterPool: the call before it in the conversation did not end in time.")
            try:
                if slot.session is None:
                    self._take(slot, deadline)
                lost, slot.lost = slot.lost, None
                result = slot.session.run(code, deadline=deadline, fresh=fresh)
                if not slot.session.alive:
                    self._drop(slot)
                return replace(result, lost_before=lost)
            finally:
                slot.lock.release()
        finally:
            if conversation is None:
                self.end(key)
            self._leave(slot)

    def warm_up(self, count: int, deadline: float) -> None:
        """Waits until ``count`` interpreters stand ready, and keeps as many from now on."""
        if count > self.max_interpreters:
            raise ConfigError(
                f"InterpreterPool: must not exceed max_interpreters={self.max_interpreters}: got {count}."
            )
        with self._changed:
            self.spare = max(self.spare, count)
            self._ensure_launcher()
            self._changed.notify_all()
            while len(self._spares) < count:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(f"InterpreterPool: {count} interpreters must start in time.")
            spares = list(self._spares)
            failed = [session for session in spares if isinstance(session, BaseException)]
            for error in failed:
                self._spares.remove(error)
        if failed:
            raise failed[0]
        for session in spares:
            session.wait_ready(deadline)  # type: ignore[union-attr]

    def end(self, conversation: Hashable) -> None:
        """The conversation is over: its interpreter is killed."""
        with self._changed:
            slot = self._slots.pop(conversation, None)
            if slot is not None:
                slot.ended = True
                if slot.users == 0:
                    self._drop(slot)

    def close(self) -> None:
        """Kills every interpreter and waits, a minute at most, until calls and all their processes have ended."""
        deadline = time.monotonic() + 5.0
        with self._changed:
            self._closed = True
            for slot in self._slots.values():
                if slot.users == 0:
                    self._drop(slot)
                elif slot.session is not None:
                    slot.session.terminate()  # its call ends, and frees it
            while self._spares:
                self._bury(self._spares.popleft())
            self._changed.notify_all()
            while self._in_use and self._changed.wait(max(0.0, deadline - time.monotonic())):
                pass
            launcher = self._launcher
        if launcher is not None and launcher is not threading.current_thread():
            launcher.join(timeout=_END_S)
            if launcher.is_alive():
                left = [session.process.pid for session in self._dying]
                _LOG.warning("interpreter pool: processes %s have not ended %g s after they were killed", left, _END_S)

    def _enter(self, key: Hashable) -> _Slot:
        with self._changed:
            if self._closed:
                raise ConfigError("InterpreterPool: must not be closed: got a call after close().")
            if self._launcher is not None and self._process != os.getpid():
                raise ConfigError(
                    "InterpreterPool: must not be used before and after a fork; make one in each process."
                )
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            slot.users += 1
            return slot

    def _leave(self, slot: _Slot) -> None:
        with self._changed:
            slot.users -= 1
            if slot.users == 0 and (slot.ended or self._closed):
                self._drop(slot)
            self._changed.notify_all()

    def _take(self, slot: _Slot, deadline: float) -> None:
        """Gives the slot a ready interpreter, within the bound."""
        with self._changed:
            while self._in_use >= self.max_interpreters:
                idle = next((slot for slot in self._slots.values() if slot.users == 0 and slot.session), None)
                if idle is not None:
                    idle.lost = "others needed its place"
                    self.counters["evicted"] += 1
                    self._drop(idle)
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(f"InterpreterPool: all {self.max_interpreters} interpreters were busy.")
            self._in_use += 1
            self._peak = max(self._peak, self._in_use)
            self._waiting += 1
            self._ensure_launcher()
            self._changed.notify_all()
            try:
                while not self._spares:
                    if self._closed:
                        raise DeadlineError(_WAS_CLOSED)
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        raise DeadlineError("InterpreterPool: no interpreter was started in time.")
                session = self._spares.popleft()
                if isinstance(session, BaseException):
                    raise session
            except BaseException:
                self._in_use -= 1
                raise
            finally:
                self._waiting -= 1
        try:
            session.wait_ready(min(deadline, time.monotonic() + _START_S))
            with self._changed:  # `close` ends what it finds in a slot
                if self._closed:
                    raise DeadlineError(_WAS_CLOSED)
                slot.session = session
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._bury(session)
            raise

    def _drop(self, slot: _Slot) -> None:
        with self._changed:
            if slot.session is not None:
                self._bury(slot.session)
                slot.session = None
                self._in_use -= 1
                self.counters["killed"] += 1
                self._changed.notify_all()

    def _bury(self, session: Session | BaseException) -> None:
        if isinstance(session, Session):
            session.kill()
            self._dying.append(session)

    def _ensure_launcher(self) -> None:
        if self._launcher is None:
            self._process = os.getpid()
            self._launcher = threading.Thread(target=self._launch, name="interpreter pool", daemon=True)
            self._launcher.start()

    def _launch(self) -> None:
        """The one thread that starts interpreters, because they die with the thread that did; it also buries them."""
        while True:
            with self._changed:
                self._dying = [session for session in self._dying if not session.reaped()]
                if self._closed and not self._dying and not self._in_use:
                    return
                standing = self._peak - self._in_use
                wanted = max(self._waiting, min(max(self.spare, standing), self.max_interpreters - self._in_use))
                if self._closed or len(self._spares) >= wanted:
                    self._changed.wait(0.01 if self._dying or self._closed else None)
                    continue
            try:
                session: Session | BaseException = self.sandbox.start()
            except Exception as error:
                session = error
            with self._changed:
                if self._closed:
                    self._bury(session)
                else:
                    self._spares.append(session)
                    self.counters["started"] += 1
                self._changed.notify_all()


@dataclass(eq=False)
class _Slot:
    """A conversation's place: its interpreter, if it has one now."""

    session: Session | None = None
    lost: str | None = None
    users: int = 0  # calls that run or wait
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
