"""The host's side of one interpreter: sends code, collects output and answers, kills it. No input is trusted."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Literal

from llmrl.concurrency.processes import poll_timeout, signal_group, write_all
from llmrl.errors import LLMRLError
from llmrl.tools.sandbox.limits import Limits, Processes

_MAX_ANSWER = 256 * 1024  # bytes
_MAX_OUTPUT = 256  # times the kept output: code that writes more is stopped
_SET_UP_S = 20.0  # for bubblewrap to report the first process of the namespace, on a busy machine
_CHECK_S = 0.025  # between two checks of the processes' memory


class SessionError(LLMRLError, RuntimeError):
    """An interpreter that could not be started."""


@dataclass(frozen=True)
class Execution:
    """The result of running one piece of code."""

    status: Literal["ok", "error", "timeout"]
    output: str  # what it wrote to stdout and stderr, in order, and the value of a last expression
    error: str | None = None  # the traceback, or why there is none
    duration_s: float = 0.0
    lost_before: str | None = None  # why the conversation's earlier interpreter was replaced, if it was
    lost_after: bool = False  # the interpreter is gone; the next call gets a new one


class _NoAnswer(Exception):
    """The code was stopped or its interpreter failed; the text is the reason that the model reads."""


class Session:
    """One interpreter with its process tree; used by one thread at a time. Between calls the whole tree is stopped."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pipes: tuple[int, int, int, int],
        limits: Limits,
        folder: tempfile.TemporaryDirectory[str] | None,
    ):
        self.process = process
        self.alive = True
        self._requests, self._answers, self._output, self._info = pipes
        self._limits = limits
        self._folder = folder  # of a plain subprocess, which has no process namespace; None in bubblewrap
        self._ready = False
        self._received = bytearray()  # an incomplete line from the answer pipe
        self._first: int | None = None  # a descriptor of the namespace's first process, for signals
        self._processes: Processes | None = None  # None in a plain subprocess
        self._killed_at = 0.0
        # The process at the other end may stop in the middle of a line: reads and writes must not block.
        for descriptor in pipes:
            os.set_blocking(descriptor, False)

    def wait_ready(self, deadline: float) -> None:
        """Waits until the interpreter accepts code; raises SessionError with its output if it does not."""
        if self._ready:
            return
        collected = _Output(self._limits)
        try:
            self._answer("ready", collected, deadline)
            if self._folder is None:  # now, before any code has run that could interfere
                self._processes = Processes(self._find_first())
                if not self._processes.stop():
                    raise TimeoutError
            self._ready = True
            return
        except TimeoutError:
            reason = "it was not ready in time"
        except _NoAnswer as error:
            reason = str(error)
        except OSError as error:
            reason = f"its processes must be visible in /proc: {error}"
        self.kill()
        raise SessionError(f"Sandbox: an interpreter must start: {reason}. {collected.text()}".rstrip())

    def run(self, code: str, *, deadline: float, fresh: bool = False) -> Execution:
        """Runs the code until it ends, or kills the interpreter at the deadline (of `time.monotonic`).

        Never raises because of the code, even if it tampers with the pipes. ``fresh`` runs it in a separate process.
        """
        started = time.monotonic()
        self._drain(_Output(self._limits))  # discard output that threads wrote since the last answer
        collected = _Output(self._limits)
        # Code that finds the pipe cannot forge the answer to a later call, because it does not know its id.
        request_id = secrets.token_hex(16)
        status: Literal["ok", "error", "timeout"]
        answered = False
        try:
            self._ask({"id": request_id, "code": code, "fresh": fresh}, deadline)
            error = self._answer(request_id, collected, deadline)
            status, answered = "ok" if error is None else "error", True
        except TimeoutError:
            status, error = "timeout", f"stopped after {time.monotonic() - started:.1f} s, its time was over"
        except _NoAnswer as failure:
            status, error = "error", str(failure)
        self._drain(collected)  # output written before the answer is in the pipe by now
        duration_s = time.monotonic() - started
        if not (answered and self._stop()):
            self.kill()
        return Execution(status, collected.text(), error, duration_s, lost_after=not self.alive)

    def kill(self) -> None:
        """Kills the whole process tree and closes its pipes; does not wait until it has ended."""
        if not self.alive:
            return
        self.alive, self._killed_at = False, time.monotonic()
        self.terminate()
        os.close(self._requests)
        os.close(self._answers)
        if self._processes is not None:
            self._processes.close()
        if self._first is not None:
            self._close_first()

    def terminate(self) -> None:
        """Kills the whole process tree; a call that runs in another thread then ends.

        Kills the first process of the namespace; the kernel then kills all others. Its parents exit by themselves and
        reap it, so nothing is left for process 1 of this machine to reap. Until bubblewrap has reported that process,
        a kill would leave it behind, so `reaped` tries again.
        """
        self._find_first()
        if self._first is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self._folder is not None:
            self._signal_group(signal.SIGKILL)

    def reaped(self) -> bool:
        """After `kill`: True once every process of the tree is gone and its resources are freed."""
        if self._output >= 0 and self._drain(_Output(self._limits)):  # every process of the tree holds the other end
            os.close(self._output)
            self._output = -1
        if self._output >= 0 or self.process.poll() is None:
            if self._info >= 0:
                self.terminate()
                if time.monotonic() > self._killed_at + _SET_UP_S:
                    self._signal_group(signal.SIGKILL)
            return False
        if self._info >= 0:
            self._close_first()
        if self._folder is not None:
            self._folder.cleanup()
        return True

    def _ask(self, request: dict[str, Any], deadline: float) -> None:
        data = json.dumps(request).encode() + b"\n"
        fits = len(data) <= select.PIPE_BUF  # into the pipe, before the resume: the interpreter wakes only once
        try:
            if not fits:
                self._resume()
            write_all(self._requests, data, deadline)
            if fits:
                self._resume()
        except BrokenPipeError:
            raise _NoAnswer(self._end_of_interpreter()) from None

    def _answer(self, request_id: str, collected: _Output, deadline: float) -> str | None:
        """The code's error, or None; collects output while waiting.

        Raises  TimeoutError at the deadline, _NoAnswer if the code was stopped for another reason
        """
        poller = select.poll()
        poller.register(self._answers, select.POLLIN)
        poller.register(self._output, select.POLLIN)
        next_check = time.monotonic() + _CHECK_S if self._processes is not None else float("inf")
        while True:
            events = dict(poller.poll(poll_timeout(min(deadline, next_check))))
            if time.monotonic() >= next_check:
                if (excess := self._processes.excess(self._limits)) is not None:
                    raise _NoAnswer(f"stopped: {excess}")
                next_check = time.monotonic() + _CHECK_S
            if self._output in events:
                if (data := _read(self._output)) == b"":
                    # Every process has closed it: from now on poll would return at once, forever.
                    poller.unregister(self._output)
                collected.add(data or b"")
                if collected.is_full:
                    raise _NoAnswer(f"stopped: it wrote more than {collected.limit * _MAX_OUTPUT >> 20} MiB of output")
            if self._answers in events:
                if (data := _read(self._answers)) == b"":
                    raise _NoAnswer(self._end_of_interpreter())
                self._received += data or b""
                if b"\n" in self._received or len(self._received) > _MAX_ANSWER:
                    line, self._received = self._received, bytearray()
                    return _error_of(line, request_id)
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _drain(self, collected: _Output) -> bool:
        """Collects the available output; True at end of file, which means that all processes have ended."""
        while data := _read(self._output):
            collected.add(data)
            if collected.is_full:
                break
        return data == b""

    def _end_of_interpreter(self) -> str:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The pipe closes a moment before the process exits.
            code = self.process.wait(timeout=1.0)
        number = -code if code is not None and code < 0 else (code or 0) - 128  # bubblewrap's form
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return f"the interpreter was stopped: it used up its {self._limits.cpu_s} s of processor time or its memory"
        if number in signal.Signals._value2member_map_:
            return f"the interpreter crashed ({signal.Signals(number).name})"
        return "the interpreter ended" + (f" with exit code {code}" if code else "")

    def _find_first(self) -> int:
        """The number of the namespace's first process, once bubblewrap has reported it; else -1."""
        report = _read(self._info)
        if not report or not hasattr(os, "pidfd_open"):
            return -1
        try:
            pid = json.loads(report)["child-pid"]
            descriptor = os.pidfd_open(pid)
        except (OSError, ValueError):
            return -1
        if self.process.poll() is None:
            self._first = descriptor
            return pid
        os.close(descriptor)  # it has ended, and the number may be another process's by now
        return -1

    def _close_first(self) -> None:
        for descriptor in (self._info, self._first):
            if descriptor is not None:
                os.close(descriptor)
        self._info, self._first = -1, None

    def _stop(self) -> bool:
        """Stops everything in the tree, including the code's threads and children; False if that fails."""
        return self._signal_group(signal.SIGSTOP) if self._processes is None else self._processes.stop()

    def _resume(self) -> None:
        if self._processes is None:
            self._signal_group(signal.SIGCONT)
        else:
            self._processes.resume()

    def _signal_group(self, number: signal.Signals) -> bool:
        if self.process.poll() is None:
            signal_group(self.process.pid, number)
        return True


class _Output:
    """The first part of a call's output, and the size of the rest."""

    def __init__(self, limits: Limits):
        self.limit = limits.output_kib * 1024
        self._kept = bytearray()
        self._total = 0

    @property
    def is_full(self) -> bool:
        return self._total > self.limit * _MAX_OUTPUT

    def add(self, data: bytes) -> None:
        self._kept += data[: max(0, self.limit - len(self._kept))]
        self._total += len(data)

    def text(self) -> str:
        text = self._kept.decode("utf-8", "replace")
        cut = self._total - len(self._kept)
        return f"{text}\n[... {cut:,} more bytes of output cut ...]\n" if cut else text


def _error_of(line: bytes, request_id: str) -> str | None:
    """The error in an answer: one line of JSON with the id of its request. Raises _NoAnswer for anything else."""
    try:
        answer: Any = json.loads(line)
        error = answer.pop("error")
        if answer == {"id": request_id} and isinstance(error, str | None):
            return error
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        pass
    raise _NoAnswer("the interpreter's answer could not be read")


def _read(descriptor: int) -> bytes | None:
    """The available bytes; b"" at the end of the pipe, None if no bytes are available yet."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""
