"""Reports on a child process that failed: how it ended, its last lines of output, the shared memory it left."""

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

_SHARED_MEMORY = Path("/dev/shm")
_KEPT_LINES = 30
_KILLED_S = 5.0  # for a killed process to be gone, on a busy machine
_MAX_LINE = 500  # characters


class LogTail:
    """Keeps the last lines that child processes write, and passes everything on to where it would have gone.

    noise  a pattern that is neither kept nor passed on

    Made and closed in the thread of ``loop``, which reads the pipes. `inherited` and `lines` are for any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, noise: re.Pattern[bytes] | None = None) -> None:
        self._loop, self._noise = loop, noise
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._unfinished = {1: "", 2: ""}
        self._writing, self._reading, self._original = {}, {}, {}
        for stream in (1, 2):
            self._reading[stream], self._writing[stream] = os.pipe()
            os.set_blocking(self._reading[stream], False)
            self._original[stream] = os.dup(stream)
            loop.add_reader(self._reading[stream], self._read, stream)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Inside the block this process, and those that it starts, write their output and errors into the pipes."""
        _flush()  # what was printed before goes where it would have gone
        for stream, pipe in self._writing.items():
            os.dup2(pipe, stream)  # programs inherit the result of dup2, and not that of os.pipe
        try:
            yield
        finally:
            _flush()
            for stream, pipe in self._writing.items():
                os.dup2(self._original[stream], stream)
                os.close(pipe)  # so that the pipe ends when the last child has closed its copy
            self._writing = {}

    def drain(self) -> None:
        """Reads what is there now."""
        for stream in list(self._reading):
            self._read(stream)

    def close(self) -> None:
        for pipe in (*self._reading.values(), *self._writing.values(), *self._original.values()):
            self._loop.remove_reader(pipe)
            os.close(pipe)
        self._reading, self._writing, self._original = {}, {}, {}

    def lines(self) -> str:
        """For the end of a message."""
        kept = [line for line in (*self._kept, *self._unfinished.values()) if line.strip()]
        return "It wrote nothing." if not kept else "Its last lines:\n" + "\n".join(f"  {line}" for line in kept)

    def _read(self, stream: int) -> None:
        pipe = self._reading[stream]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, 1 << 16):
                if self._noise is not None:
                    data = self._noise.sub(b"", data)
                with contextlib.suppress(OSError):  # the original stream may have lost its reader
                    os.write(self._original[stream], data)
                # A read may end in the middle of a line, and a line may never end: both are kept, cut short.
                *finished, rest = (self._unfinished[stream] + data.decode(errors="replace")).split("\n")
                self._kept.extend(line[:_MAX_LINE] for line in finished)
                self._unfinished[stream] = rest[:_MAX_LINE]
            self._loop.remove_reader(pipe)  # all writers have ended
            os.close(self._reading.pop(stream))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # absent or closed
            stream.flush()


def wait_for_exit(process: Any, seconds: float) -> None:
    """Waits at most ``seconds`` until a process has ended and its exit code is known."""
    end = time.monotonic() + seconds
    process.join(seconds)
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.005)  # another thread has collected the code and not stored it yet


def end_process(process: Any, seconds: float) -> None:
    """Waits at most ``seconds`` for a process that was asked to end; then kills it."""
    wait_for_exit(process, seconds)
    if process.exitcode is None:
        process.kill()
        wait_for_exit(process, _KILLED_S)


def process_state(process: Any) -> str:
    """The state of a started multiprocessing.Process: "runs", "is stopped", "was killed by SIGKILL", "ended with exit
    code 1".
    """
    code = process.exitcode
    if code is not None:
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return "is stopped"
    return "runs"


def shared_memory_of(pid: int) -> set[Path]:
    """The files of Python's shared memory and locks that a process of this machine, or one that it started, has mapped
    and this process has not.
    """
    # Without what this process has mapped too, such as its own locks.
    mapped = _mapped_inodes(pid) - _mapped_inodes(os.getpid(), children=False)
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.name.startswith(("psm_", "sem.mp-")) and path.stat().st_ino in mapped:
                found.add(path)  # nothing else: a model's folder may be in such memory too
    return found


def _mapped_inodes(pid: int, *, children: bool = True) -> set[int]:
    """Inodes, because a lock is mapped under a name that it no longer has."""
    found = set()
    with contextlib.suppress(OSError):  # the process ended, or the system has no /proc
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{_SHARED_MEMORY}/"):
                found.add(int(inode))
        if children:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                found |= _mapped_inodes(int(child))
    return found


def remove_shared_memory(paths: Iterable[Path]) -> None:
    """Removes what a killed process could not, and takes it off the list of Python's resource tracker."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            name = path.name.removeprefix("sem.")
            resource_tracker.unregister(f"/{name}", "shared_memory" if name == path.name else "semaphore")
