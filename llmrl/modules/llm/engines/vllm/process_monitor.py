"""What is known of an engine's process when it fails: how it ended, and the last lines that it wrote.

Whatever is started while `LogTail.inherited` writes into two pipes. What comes out of them is passed on to where it
would have gone, and the last lines are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

__all__ = ["LogTail", "await_end", "fate", "remove_shared_memory", "shared_memory_of"]

_SHARED_MEMORY = Path("/dev/shm")
_KEPT = 30  # lines
_LONGEST = 500  # characters of one


class LogTail:
    """The reading ends of the pipes, read by ``loop`` whenever something comes.

    noise  what is neither kept nor passed on

    Made and closed in the loop's thread. `inherited` and `lines` are for any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, noise: re.Pattern[bytes] | None = None) -> None:
        self._loop, self._noise = loop, noise
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._begun = {1: "", 2: ""}  # lines that have not ended
        self._writing = {}
        self._reading = {}
        self._passed_on = {}
        for standard in (1, 2):
            self._reading[standard], self._writing[standard] = os.pipe()
            os.set_blocking(self._reading[standard], False)
            self._passed_on[standard] = os.dup(standard)
            loop.add_reader(self._reading[standard], self._read, standard)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that are started inside the block have the pipes as their standard output and error. So has this
        one meanwhile, which changes nothing but who passes it on.
        """
        _flush()
        for standard, pipe in self._writing.items():
            os.dup2(pipe, standard)  # inherited by programs, which what os.pipe gave is not
        try:
            yield
        finally:
            _flush()
            for standard, pipe in self._writing.items():
                os.dup2(self._passed_on[standard], standard)
                os.close(pipe)
            self._writing = {}

    def drain(self) -> None:
        """Reads what is there now."""
        for standard in list(self._reading):
            self._read(standard)

    def close(self) -> None:
        for pipe in (*self._reading.values(), *self._writing.values(), *self._passed_on.values()):
            self._loop.remove_reader(pipe)
            os.close(pipe)
        self._reading, self._writing, self._passed_on = {}, {}, {}

    def lines(self) -> str:
        """For the end of a message."""
        kept = [line for line in (*self._kept, *self._begun.values()) if line.strip()]
        return "It wrote nothing." if not kept else "Its last lines:\n" + "\n".join(f"  {line}" for line in kept)

    def _read(self, standard: int) -> None:
        pipe = self._reading[standard]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, 1 << 16):
                if self._noise is not None:
                    data = self._noise.sub(b"", data)
                with contextlib.suppress(OSError):  # nobody may be left to read it
                    os.write(self._passed_on[standard], data)
                *whole, begun = (self._begun[standard] + data.decode(errors="replace")).split("\n")
                self._kept.extend(line[:_LONGEST] for line in whole)
                self._begun[standard] = begun[:_LONGEST]
            self._loop.remove_reader(pipe)  # all writers have ended
            os.close(self._reading.pop(standard))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.flush()


def await_end(process: Any, seconds: float) -> None:
    """Waits for a process to have ended, at most ``seconds``; then its exit code is known."""
    end = time.monotonic() + seconds
    process.join(seconds)
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.005)  # another thread has collected the code, and has not noted it yet


def fate(process: Any) -> str:
    """What became of a process: "runs", "is stopped", "was killed by SIGKILL", "ended with exit code 1".

    process  a multiprocessing.Process that was started
    """
    code = process.exitcode
    if code is None:
        return "is stopped" if _is_stopped(process.pid) else "runs"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def shared_memory_of(pid: int) -> set[Path]:
    """The files of Python's shared memory and locks that a process of this machine, or one that it started, has mapped
    and this process has not.
    """
    mapped = _mapped_by(pid) - _mapped_by(os.getpid(), children=False)
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # it is gone
            if path.name.startswith(("psm_", "sem.mp-")) and path.stat().st_ino in mapped:
                found.add(path)  # no other: a model's folder may be in such memory too
    return found


def _mapped_by(pid: int, *, children: bool = True) -> set[int]:
    """By the numbers of the files: a lock is mapped under a name that it has no longer."""
    found = set()
    with contextlib.suppress(OSError):  # it ended, or the system has no such files
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, number, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{_SHARED_MEMORY}/"):
                found.add(int(number))
        if children:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                found |= _mapped_by(int(child))
    return found


def remove_shared_memory(paths: Iterable[Path]) -> None:
    """Does what a process that was killed could not do any more; Python's resource tracker need not do it either."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            name = path.name.removeprefix("sem.")
            resource_tracker.unregister(f"/{name}", "shared_memory" if name == path.name else "semaphore")


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
