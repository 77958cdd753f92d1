"""Functions in a reusable process that is killed at a deadline: `WorkerPool` for the owner, `serve` for the process.

For code that may hang inside C, swallow interrupts or take unbounded memory: users' rewards, algebra on answers. The
process runs a script, so that no process is forked after threads or CUDA started, and the main module is not run again.
Requests are pickled; replies are JSON lines, so that the owner never unpickles data of the function.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmrl.concurrency.processes import poll_timeout, signal_group, write_all
from llmrl.errors import DeadlineError, LLMRLError, WorkerError

START_S = 120.0  # for imports, on a busy machine
WAIT_S = 600.0  # for other callers to return a process
_BOOT = (
    "import json, runpy, sys; own, more = json.loads(sys.argv.pop(1)); sys.path[:] = (own or sys.path) + more; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class WorkerPool:
    """At most ``size`` processes of one script. A process is started when all others are busy, and then reused.

    ``who`` names the owner in messages. The processes end with `close`, with this object or with this process.
    """

    def __init__(self, script: Path, arguments: Sequence[str], *, size: int, who: str, quiet: bool = False):
        self._command = [str(script), *arguments]
        self._who, self._quiet, self._size = who, quiet, size
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._busy_since: dict[object, float] = {}

    @contextlib.contextmanager
    def worker(self, wait_s: float = WAIT_S) -> Iterator[WorkerProcess]:
        """A process for the exclusive use of this caller, as soon as one is free; it is stopped if the block raises.

        Raises  DeadlineError if none is free within ``wait_s`` seconds; DeadlineError, WorkerError if it fails to start
        """
        if not self._free.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
            longest_s = time.monotonic() - min(list(self._busy_since.values()), default=time.monotonic())
            raise DeadlineError(
                f"{self._who}: one of its {self._size} processes must be free within {wait_s:g} s: all were busy, one "
                f"of them for {longest_s:.0f} s."
            )
        caller = object()
        try:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
                self._busy_since[caller] = time.monotonic()
            # Started outside the lock: it takes seconds, during which other callers can get and return processes.
            worker = worker or WorkerProcess(self._command, who=self._who, quiet=self._quiet)
            try:
                yield worker
            except BaseException:
                worker.stop()  # it may be in the middle of a request, whose replies the next caller would read
                raise
            if worker.stop.alive:
                with self._lock:
                    self._idle.append(worker)
        finally:
            with self._lock:
                del self._busy_since[caller]
            self._free.release()

    def close(self) -> None:
        """Ends the idle processes; the next request starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()


class WorkerProcess:
    """One process; ``stop`` kills it and all processes that it started.

    ``python``: another interpreter, whose packages come before those of this process; None: this one
    """

    def __init__(self, command: Sequence[str], *, who: str, quiet: bool, python: str | None = None):
        self._who = who
        self._received = bytearray()
        read_requests, self._requests = os.pipe()
        self._replies, write_replies = os.pipe()
        read_owner, self._owner = os.pipe()  # nothing is ever written to it: it ends when this process does
        output = subprocess.DEVNULL if quiet else None
        path = [str(entry) for entry in sys.path]
        path = json.dumps([path, []] if python is None else [[], path])
        try:
            self._process = subprocess.Popen(
                [
                    python or sys.executable,
                    "-c",
                    _BOOT,
                    path,
                    *command,
                    *map(str, (read_owner, read_requests, write_replies)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[read_owner, read_requests, write_replies],
                start_new_session=True,  # Ctrl-C reaches only the owner, and the whole group can be killed
            )
        except BaseException:
            for descriptor in (self._owner, self._requests, self._replies):
                os.close(descriptor)
            raise
        finally:
            # The child has its own copies. If ours stayed open, the end of the child would go unnoticed.
            for descriptor in (read_owner, read_requests, write_replies):
                os.close(descriptor)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self.stop = weakref.finalize(self, _end, self._process, self._requests, self._replies, self._owner)
        try:
            self._line(time.monotonic() + START_S)  # "ready"
        except LLMRLError:
            self.stop()
            raise

    def ask(self, request: Any, timeout_s: float | None) -> Iterator[Any]:
        """The replies as they arrive, until the request is done.

        Raises  DeadlineError ``timeout_s`` seconds after the process has read the request, WorkerError if the process
                ended: it cannot be used again; TypeError, AttributeError or pickle.PicklingError for a request that
                cannot be pickled
        """
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        start_by = time.monotonic() + START_S  # unpickling the request may import modules
        try:
            write_all(self._requests, len(data).to_bytes(8, "big") + data, start_by)
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise self._ended() from None
        self._line(start_by)  # "read": the timeout of the request begins now
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while line := self._line(deadline):  # an empty line ends the replies
            yield json.loads(line)

    def _line(self, deadline: float) -> bytes:
        """The next line without its end."""
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        while (end := self._received.find(b"\n")) < 0:
            if poller.poll(poll_timeout(deadline)):
                if not (data := os.read(self._replies, 1 << 16)):
                    raise self._ended()
                self._received += data
            elif time.monotonic() >= deadline:  # not otherwise: poll waits at most an hour
                raise self._late()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _late(self) -> DeadlineError:
        return DeadlineError(f"{self._who}: its process must answer before the deadline: it did not.")

    def _ended(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        code = self._process.returncode
        how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
        return WorkerError(f"{self._who}: its process must run until it is closed: it ended{how}.")


def _end(process: subprocess.Popen[bytes], *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    if process.poll() is None:
        signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def serve(handle: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Main loop of the process: calls ``handle(request, reply)`` for each request, until the owner closes or ends.

    ``reply`` takes values that JSON can represent, from any thread. If the owner ends while a request is handled, a
    signal ends this process, even if the handler holds the GIL.
    """
    import fcntl  # not at the top: the owner's side is imported on every system, also where fcntl is missing

    owner, requests, replies = map(int, sys.argv[-3:])
    for descriptor in (owner, requests, replies):  # child processes of the handler must not keep the pipes open
        os.set_inheritable(descriptor, False)
    lock = threading.Lock()

    def write(line: bytes) -> None:
        with lock:
            data = line + b"\n"
            while data:
                data = data[os.write(replies, data) :]

    # Not of `requests`: a write that the owner has begun may still signal after its data was read.
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(owner, fcntl.F_GETFL)
    write(b"ready")
    with contextlib.suppress(BrokenPipeError), open(requests, "rb", closefd=False) as stream:
        while header := stream.read(8):
            size = int.from_bytes(header, "big")
            request = pickle.loads(stream.read(size))
            fcntl.fcntl(owner, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which ends this process, at its end
            if select.select([owner], [], [], 0)[0]:  # the owner ended before the signal was enabled
                return
            write(b"read")
            handle(request, lambda value: write(json.dumps(value).encode()))
            fcntl.fcntl(owner, fcntl.F_SETFL, flags)
            write(b"")
