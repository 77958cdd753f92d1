"""Functions in a process of their own, kept warm, that can be killed whatever they do: `WorkerPool`, `serve`.

For what may hang inside C code, swallow interrupts or take memory without end: users' rewards, algebra on answers. The
process is started by a script, so that nothing is forked after threads or CUDA and the main module is not run again.
What the function is, and what its requests mean, is the script's part. Requests are pickled, replies are JSON: nothing
that the function made is executed here.
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

from llmrl.errors import DeadlineError, LLMRLError, WorkerError

__all__ = ["WorkerPool", "WorkerProcess", "serve"]

START_S = 120.0  # for imports, on a busy machine
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class WorkerPool:
    """At most ``size`` processes of one script, each started when all others are busy, and killed where it is late.

    ``who`` names the owner in messages. The processes end with `close`, with this object and with this process.
    """

    def __init__(self, script: Path, arguments: Sequence[str], *, size: int, who: str, quiet: bool = False):
        self._command = [str(script), *arguments]
        self._who, self._quiet = who, quiet
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []

    @contextlib.contextmanager
    def worker(self) -> Iterator[WorkerProcess]:
        """One for this caller alone, once one is free; the caller stops it where it fails.

        Raises  DeadlineError, WorkerError where it does not start
        """
        with self._free:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or WorkerProcess(self._command, who=self._who, quiet=self._quiet)
            try:
                yield worker
            except BaseException:
                worker.stop()
                raise
            if worker.stop.alive:
                with self._lock:
                    self._idle.append(worker)

    def close(self) -> None:
        """Ends the processes that are idle; the next request starts another one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()


class WorkerProcess:
    """One process; ``stop`` kills it with all that it started."""

    def __init__(self, command: Sequence[str], *, who: str, quiet: bool):
        self._who = who
        self._replied = bytearray()
        read_requests, self._requests = os.pipe()
        self._replies, write_replies = os.pipe()
        output = subprocess.DEVNULL if quiet else None
        path = json.dumps([str(entry) for entry in sys.path])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, path, *command, str(read_requests), str(write_replies)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[read_requests, write_replies],
                start_new_session=True,  # Ctrl-C is for the owner; and what it starts can be killed with it
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._replies)
            raise
        finally:
            os.close(read_requests)
            os.close(write_replies)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self._process = process
        self.stop = weakref.finalize(self, _end, process, self._requests, self._replies)
        try:
            self._line(time.monotonic() + START_S)
        except LLMRLError:
            self.stop()
            raise

    def ask(self, request: Any, timeout_s: float | None) -> Iterator[Any]:
        """The replies as they come, until the request is done.

        Raises  DeadlineError ``timeout_s`` seconds after the process has read it, WorkerError where the process ended:
                it cannot be used again; TypeError, AttributeError or pickle.PicklingError for a request that cannot be
                sent
        """
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        start_by = time.monotonic() + START_S  # reading may import what the request holds
        self._send(memoryview(len(data).to_bytes(8, "big") + data), start_by)
        self._line(start_by)
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while line := self._line(deadline):
            yield json.loads(line)

    def _send(self, data: memoryview, deadline: float) -> None:
        while data:
            self._wait(self._requests, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise WorkerError(self._said_at_end()) from None

    def _line(self, deadline: float) -> bytes:
        """The next line without its end."""
        while (end := self._replied.find(b"\n")) < 0:
            self._wait(self._replies, select.POLLIN, deadline)
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise WorkerError(self._said_at_end())
            self._replied += data
        line = bytes(self._replied[:end])
        del self._replied[: end + 1]
        return line

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left = deadline - time.monotonic()
        if not poll.poll(None if left == float("inf") else max(0.0, left * 1000)):
            raise DeadlineError(f"{self._who}: its process must answer in time: it did not.")

    def _said_at_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        code = self._process.returncode
        how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
        return f"{self._who}: its process must go on until it is closed: it ended{how}."


def serve(handle: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """In the process: calls ``handle(request, reply)`` for each request, until the owner closes or ends.

    ``reply`` takes what JSON can write, from any thread. While a request is handled the end of the owner ends this
    process by a signal, which needs no interpreter lock.
    """
    import fcntl  # here: the owner's side is imported on every system

    requests, replies = int(sys.argv[-2]), int(sys.argv[-1])
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    lock = threading.Lock()

    def reply(value: Any) -> None:
        write(json.dumps(value).encode() + b"\n")

    def write(data: bytes) -> None:
        with lock:
            while data:
                data = data[os.write(replies, data) :]

    fcntl.fcntl(requests, fcntl.F_SETOWN, os.getpid())
    plain = fcntl.fcntl(requests, fcntl.F_GETFL)
    write(b"ready\n")
    with contextlib.suppress(BrokenPipeError), open(requests, "rb", buffering=0, closefd=False) as stream:
        while header := _read(stream, 8):
            request = pickle.loads(_read(stream, int.from_bytes(header, "big")))
            fcntl.fcntl(requests, fcntl.F_SETFL, plain | os.O_ASYNC)  # SIGIO, which ends a process, when it is closed
            if select.select([requests], [], [], 0)[0]:
                return
            write(b"read\n")
            handle(request, reply)
            fcntl.fcntl(requests, fcntl.F_SETFL, plain)
            write(b"\n")


def _read(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data if len(data) == size else b""


def _end(process: subprocess.Popen[bytes], *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
