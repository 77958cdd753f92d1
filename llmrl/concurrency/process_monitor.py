"""Diagnosis of a failed child process: how it ended, its last lines of output, the shared memory that it left."""

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
_KILLED_S = 5.0  # for a killed process to end, on a busy machine
_MAX_LINE = 500  # characters


class LogTail:
    """Keeps the last lines that child processes write, and forwards everything to the original stdout and stderr.

    noise  a pattern; text that matches it is neither kept nor forwarded

    Must be created and closed in the thread of ``loop``, which reads the pipes. Any thread may call `inherited` and
    `lines`.
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
        """Inside the block, stdout and stderr of this process and of those that it starts go into the pipes."""
        _flush()  # what was printed before goes to the original streams
        for stream, pipe in self._writing.items():
            os.dup2(pipe, stream)  # child programs inherit descriptors of dup2, but not those of os.pipe
        try:
            yield
        finally:
            _flush()
            for stream, pipe in self._writing.items():
                os.dup2(self._original[stream], stream)
                os.close(pipe)  # so that the reader sees the end once the last child has closed its copy
            self._writing = {}

    def drain(self) -> None:
        """Reads all output that the pipes hold now."""
        for stream in list(self._reading):
            self._read(stream)

    def close(self) -> None:
        for pipe in (*self._reading.values(), *self._writing.values(), *self._original.values()):
            self._loop.remove_reader(pipe)
            os.close(pipe)
        self._reading, self._writing, self._original = {}, {}, {}

    def lines(self) -> str:
        """The kept lines, as text to append to a message."""
        kept = [line for line in (*self._kept, *self._unfinished.values()) if line.strip()]
        return "It wrote nothing." if not kept else "Its last lines:\n" + "\n".join(f"  {line}" for line in kept)

    def _read(self, stream: int) -> None:
        pipe = self._reading[stream]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, 1 << 16):
                if self._noise is not None:
                    data = self._noise.sub(b"", data)
                with contextlib.suppress(OSError):  # the reader of the original stream may have ended
                    os.write(self._original[stream], data)
                # A read may end inside a line, and a line may never end: the rest is kept, cut to _MAX_LINE.
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
        time.sleep(0.005)  # another thread has reaped the process and not yet stored its exit code


def end_process(process: Any, seconds: float) -> None:
    """Waits at most ``seconds`` for a process that was told to end; then kills it."""
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
    """The files of Python's shared memory and locks that a local process or one of its descendants has mapped, without
    those that this process has mapped too, such as its own locks.
    """
    mapped = _mapped_inodes(pid) - _mapped_inodes(os.getpid(), children=False)
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # the file was removed meanwhile
            if path.name.startswith(("psm_", "sem.mp-")) and path.stat().st_ino in mapped:
                found.add(path)  # no other files: a model's folder may be in /dev/shm too
    return found


def _mapped_inodes(pid: int, *, children: bool = True) -> set[int]:
    """Inodes of mapped files, and not their names, because a lock is mapped under a name that it no longer has."""
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
    """Removes shared memory that a killed process left, and unregisters it from Python's resource tracker."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            name = path.name.removeprefix("sem.")
            resource_tracker.unregister(f"/{name}", "shared_memory" if name == path.name else "semaphore")
