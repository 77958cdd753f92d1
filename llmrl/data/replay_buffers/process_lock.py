"""A lock that processes share by the name of a file, and that the death of its holder releases."""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from llmrl.errors import DeadlineError


class ProcessLock:
    """Excludes the threads of all processes that were given the lock; may be entered again by the thread inside.

    A pickled lock and one that a forked process inherited are the same lock; as long as there is none, it is one of
    threads, and the file ``path`` is left alone. The operating system lets go of the file when its holder ends, however
    it ends. Waiting longer than ``timeout_s`` raises ``DeadlineError``.
    """

    def __init__(self, path: Path, timeout_s: float = 600.0) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._file: int | None = None
        self._alone = True
        self._begin()
        _mind_forks()
        _locks.add(self)

    def _begin(self) -> None:
        """Opens the file anew in this process: what a parent process opened would be one lock with it."""
        import fcntl  # POSIX only, like shared buffers; the package imports elsewhere too

        if self._file is not None:
            os.close(self._file)
        self._flock, self._nonblocking, self._unlock = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
        self._pid = os.getpid()
        self._thread = threading.RLock()
        self._depth = 0
        self._holds_file = False
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> ProcessLock:
        if os.getpid() != self._pid:
            self._begin()
        if not self._thread.acquire(timeout=self.timeout_s):
            raise self._late()
        self._depth += 1
        if self._depth == 1 and not self._alone:
            try:
                self._acquire()
            except BaseException:
                self._depth = 0
                self._thread.release()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth and self._holds_file:
            self._holds_file = False
            self._flock(self._file, self._unlock)
        self._thread.release()

    def hand_over(self) -> None:
        """From now on other processes may have the lock, and the file counts. Waits for other threads to leave."""
        if not self._alone:
            return
        if not self._thread.acquire(timeout=self.timeout_s):
            raise self._late()
        self._alone = False
        if self._depth:  # this thread is inside
            self._acquire()
        self._thread.release()

    def _acquire(self) -> None:
        deadline, pause = time.monotonic() + self.timeout_s, 2e-5
        while True:
            try:
                self._flock(self._file, self._nonblocking)
                self._holds_file = True
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._late() from None
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"ReplayBuffer: the lock {self.path} must become free within {self.timeout_s:g} s: another thread or "
            "process of this buffer holds it and does not go on."
        )

    def __getstate__(self) -> dict[str, Any]:
        self.hand_over()
        return {"path": self.path, "timeout_s": self.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
        self._alone = False

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


@cache
def _mind_forks() -> None:
    os.register_at_fork(before=lambda: [lock.hand_over() for lock in list(_locks)])
