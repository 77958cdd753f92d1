"""A fair lock that processes share through a file and that is released when its holder exits or is killed."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llmrl.errors import DeadlineError

_FLOCK = struct.Struct("hhqqixxxx")  # struct flock: type, whence, start, length, pid
_GATE = 1 << 62  # this byte is locked while a process takes a ticket
_NUMBERS = 512  # number of process ids that the file can hold


class ProcessLock:
    """Reentrant mutual exclusion between all threads of all processes that have the lock.

    ``on_enter``, a weak reference, names a function to call after each entry: what an earlier holder that was killed
    has left half done can be undone there.

    Pickled copies and copies that a forked process inherits are the same lock. Until the first copy is made, the lock
    excludes only threads and does not use the file ``path``. Processes enter in order of arrival. The operating system
    removes a process from the queue when it ends, even if it is killed. Waiting longer than ``timeout_s`` raises
    ``DeadlineError``, which names a process that is ahead in the queue.

    The queue: a process takes the next ticket number from the file and locks the byte at that offset. Its turn comes
    once no lower byte is locked. Open-file-description locks belong to the open file, so two locks of one process
    exclude each other.
    """

    def __init__(self, path: Path, timeout_s: float = 600.0) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._file: int | None = None
        self._alone = True
        self.on_enter: Callable[[], Callable[[], None] | None] = lambda: None
        self._begin()
        _mind_forks()
        _locks.add(self)

    def _begin(self) -> None:
        """Opens the file again in this process: an inherited descriptor would share the parent's lock."""
        import fcntl  # POSIX only, like shared buffers; imported here so that the package imports on other systems

        self._fcntl = fcntl
        self._thread = threading.RLock()
        self._depth = 0
        self._ticket = 0
        inherited, self._file = self._file, None
        if inherited is not None:
            os.close(inherited)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _begin_forked(self) -> None:
        """Resets the lock in a newly forked process, which has only the forking thread and shares the lock."""
        self._alone = False
        with suppress(FileNotFoundError):  # the owner has ended and removed the folder; the next entry raises
            self._begin()

    def __enter__(self) -> ProcessLock:
        if not self._thread.acquire(timeout=self.timeout_s):
            raise self._late(f"another thread of this process ({os.getpid()})")
        self._depth += 1
        if self._depth == 1 and not self._alone:
            try:
                self._acquire()
            except BaseException:
                self._depth = 0
                self._thread.release()
                raise
        if self._depth == 1 and (repair := self.on_enter()) is not None:
            repair()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._depth:
            return  # entered before a fork: the parent process releases it
        self._depth -= 1
        if not self._depth and self._ticket:
            self._release()
        self._thread.release()

    def hand_over(self) -> None:
        """Switches to locking between processes, through the file; waits for other threads to leave."""
        if not self._alone:
            return
        left = self._thread.acquire(timeout=self.timeout_s)
        self._alone = False  # even after a timeout: the fork that called this happens in any case
        if not left:
            raise self._late(f"another thread of this process ({os.getpid()})")
        if self._depth:  # this thread holds the lock without a ticket in the queue of processes
            self._acquire()
        self._thread.release()

    # --- the queue ---

    def _acquire(self) -> None:
        if self._file is None:
            raise RuntimeError(
                f"ReplayBuffer: a shared buffer exists only as long as its owner: {self.path} does not exist any more."
            )
        deadline = time.monotonic() + self.timeout_s
        # The gate makes reading the last number and writing the next one atomic between processes.
        self._wait(deadline, lambda: self._lock(_GATE))
        try:
            ticket = int.from_bytes(os.pread(self._file, 8, 0), "little") + 1
            self._lock(ticket)  # before the next process can read the number
            os.pwrite(self._file, ticket.to_bytes(8, "little"), 0)
            # The ticket's process id, for the error message of a process that times out.
            os.pwrite(self._file, os.getpid().to_bytes(8, "little"), 8 + ticket % _NUMBERS * 8)
        finally:
            self._unlock(_GATE)
        self._ticket = ticket
        try:
            self._wait(deadline, lambda: not self._ahead())
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._unlock(self._ticket)
        self._ticket = 0

    def _wait(self, deadline: float, ready: Callable[[], bool]) -> None:
        pause = 2e-5
        while not ready():
            if time.monotonic() > deadline:
                ahead = self._ahead() if self._ticket else 0
                number = int.from_bytes(os.pread(self._file, 8, 8 + ahead % _NUMBERS * 8), "little") if ahead else 0
                raise self._late(f"process {number}" if number else "another process")
            time.sleep(pause)  # polling, because fcntl cannot wait for a record lock with a deadline
            pause = min(2 * pause, 5e-4)

    def _lock(self, byte: int) -> bool:
        try:
            self._control("F_OFD_SETLK", self._fcntl.F_WRLCK, byte, 1)
        except BlockingIOError:
            return False
        return True

    def _unlock(self, byte: int) -> None:
        self._control("F_OFD_SETLK", self._fcntl.F_UNLCK, byte, 1)

    def _ahead(self) -> int:
        """A locked ticket number lower than this process's; 0 if there is none."""
        kind, _, start, _, _ = self._control("F_OFD_GETLK", self._fcntl.F_RDLCK, 0, self._ticket)
        return 0 if kind == self._fcntl.F_UNLCK else start

    def _control(self, command: str, kind: int, start: int, length: int) -> tuple[int, ...]:
        what = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        return _FLOCK.unpack(self._fcntl.fcntl(self._file, getattr(self._fcntl, command), what))

    def _late(self, who: str) -> DeadlineError:
        return DeadlineError(
            f"ReplayBuffer: the lock {self.path} must become free within {self.timeout_s:g} s: {who} holds it, or is "
            "next in the queue, and makes no progress."
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
    os.register_at_fork(
        before=lambda: [lock.hand_over() for lock in list(_locks)],
        after_in_child=lambda: [lock._begin_forked() for lock in list(_locks)],
    )
