"""The host's side of one interpreter: sends code, collects output, reads the reply, kills. Trusts nothing it reads."""

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

from llmrl.errors import LLMRLError
from llmrl.tools.sandbox.limits import Limits
from llmrl.tools.sandbox.processes import Processes

__all__ = ["Execution", "Session", "SessionError"]

_MAX_FRAME = 256 * 1024
_FLOOD = 256  # times the output that is kept: code that writes more is stopped
_SET_UP_S = 20.0  # for bubblewrap to say which process is the first, on a busy machine
_LOOK_S = 0.025  # how often it is looked what the processes use


class SessionError(LLMRLError, RuntimeError):
    """An interpreter that could not be started."""


@dataclass(frozen=True)
class Execution:
    """What came of one piece of code. ``lost`` says why what the code had defined before is gone, if it is."""

    status: Literal["ok", "error", "timeout"]
    output: str  # what it wrote to stdout and stderr, in order, and the value of a last expression
    error: str | None = None  # the traceback, or why there is none
    duration_s: float = 0.0
    lost_before: str | None = None  # the interpreter is a new one, though the conversation had one
    lost_after: bool = False  # the interpreter is gone; the next call gets a new one


class Session:
    """One interpreter in its process tree; used by one thread at a time. Between calls nothing in the tree runs."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: int,
        replies: int,
        output: int,
        info: int,
        limits: Limits,
        folder: tempfile.TemporaryDirectory[str] | None,
    ):
        self.process = process
        self.alive = True
        self._requests, self._replies, self._output, self._info = requests, replies, output, info
        self._limits = limits
        self._folder = folder
        self._ready = False
        self._frame = bytearray()  # what came on the reply pipe and is not a whole frame yet
        self._first: int | None = None  # a descriptor of the first process of the namespace, for signals
        self._processes: Processes | None = None  # None in a plain subprocess, which bounds and hides nothing
        self._excess = ""
        self._killed_at = 0.0
        for descriptor in (requests, replies, output, info):
            os.set_blocking(descriptor, False)

    def wait_ready(self, deadline: float) -> None:
        """Until the interpreter takes code; raises SessionError with what it said if it does not."""
        if self._ready:
            return
        collected = _Output(self._limits)
        state, frame = self._wait(collected, deadline)
        if state != "frame" or frame != {"ready": True}:
            self.kill()
            reason = "not in time" if state == "timeout" else f"{state}, exit code {self.exit_code()}"
            raise SessionError(f"Sandbox: an interpreter must start: got {reason}. {collected.text()}".rstrip())
        if self._folder is None:  # now, while no code has run that could have a say in it
            try:
                self._processes = Processes(self._find_first())
            except OSError as error:
                self.kill()
                raise SessionError(f"Sandbox: this process must see those of the sandbox in /proc: {error}.") from error
        self._ready = True

    def run(self, code: str, *, deadline: float, fresh: bool = False) -> Execution:
        """Runs the code until it ends or the deadline (of `time.monotonic`) comes; then the interpreter is killed.

        Raises nothing for whatever the code does, also to the pipes. ``fresh`` runs it in a process of its own.
        """
        started = time.monotonic()
        self._resume()
        self._wait(_Output(self._limits), 0.0, only_output=True)  # left over from threads of an earlier call
        collected = _Output(self._limits)
        request_id = secrets.token_hex(16)
        state, frame = self._ask({"id": request_id, "code": code, "fresh": fresh}, collected, deadline)
        self._wait(collected, 0.0, only_output=True)  # what was written before the answer is there by now
        duration_s = time.monotonic() - started
        if state == "frame" and _is_reply(frame, request_id):
            error = frame["error"]
            if not self._stop():
                self.kill()
            status: Literal["ok", "error", "timeout"] = "ok" if error is None else "error"
            return Execution(status, collected.text(), error, duration_s, lost_after=not self.alive)
        reason = self._reason(state, duration_s)
        self.kill()
        status = "timeout" if state == "timeout" else "error"
        return Execution(status, collected.text(), reason, duration_s, lost_after=True)

    def kill(self) -> None:
        """Kills the whole process tree and closes the pipes to it; does not wait for its end."""
        if not self.alive:
            return
        self.alive, self._killed_at = False, time.monotonic()
        self.terminate()
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
        if self._processes is not None:
            self._processes.close()
        if self._first is not None:
            self._close_first()

    def terminate(self) -> None:
        """Kills the whole process tree; a call that runs in another thread then ends.

        The first process of the namespace is killed, with which the kernel ends all others. Its parents then end by
        themselves and reap it: nothing is left to process 1 of this machine. Where bubblewrap has not said yet which
        process that is, `reaped` looks again: without its parent it would stay.
        """
        self._find_first()
        if self._first is not None:
            with contextlib.suppress(OSError):  # it is over already
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self._folder is not None:
            self._kill_group()

    def reaped(self) -> bool:
        """After `kill`: whether every process of the tree is gone, and what they had is freed."""
        if self._output >= 0 and _at_end(self._output):  # each process of the tree holds the other end
            os.close(self._output)
            self._output = -1
        if self._output >= 0 or self.process.poll() is None:
            if self._info >= 0:
                self.terminate()
                if time.monotonic() > self._killed_at + _SET_UP_S:
                    self._kill_group()
            return False
        if self._info >= 0:
            self._close_first()
        if self._folder is not None:
            self._folder.cleanup()
        return True

    def _close_first(self) -> None:
        for descriptor in (self._info, self._first):
            if descriptor is not None:
                os.close(descriptor)
        self._info, self._first = -1, None

    def _find_first(self) -> int:
        """The number of the namespace's first process, once bubblewrap has said it; else -1."""
        said = _read(self._info)
        if not said or not hasattr(os, "pidfd_open"):
            return -1
        try:
            pid = json.loads(said)["child-pid"]
            descriptor = os.pidfd_open(pid)
        except (OSError, ValueError):
            return -1
        if self.process.poll() is None:
            self._first = descriptor
            return pid
        os.close(descriptor)  # it is over, and the number may be another process's by now
        return -1

    def _stop(self) -> bool:
        """Stops what runs in the tree, threads and children of the code among it; False if that cannot be done."""
        if self._processes is not None:
            return self._processes.stop()
        return self._signal_group(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._processes is not None:
            self._processes.resume()
        else:
            self._signal_group(signal.SIGCONT)

    def _kill_group(self) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> bool:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
        return True

    def exit_code(self) -> int | None:
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None

    def _ask(self, request: dict[str, Any], collected: _Output, deadline: float) -> tuple[str, Any]:
        """Sends a request and waits for what comes: the states of `_wait`."""
        if self._frame:
            return "malformed", None  # part of something that nobody asked for
        if not self._send(request, deadline):
            return "timeout" if time.monotonic() >= deadline else "ended", None
        return self._wait(collected, deadline)

    def _send(self, message: dict[str, Any], deadline: float) -> bool:
        data = memoryview(_frame(message))
        poller = select.poll()
        poller.register(self._requests, select.POLLOUT)
        while data:
            if not poller.poll(_milliseconds(deadline)) and time.monotonic() >= deadline:
                return False
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except OSError:  # nobody reads any more
                return False
        return True

    def _wait(self, collected: _Output, deadline: float, *, only_output: bool = False) -> tuple[str, Any]:
        """Collects output until there is a frame; "frame", "malformed", "ended", "flood", "excess" or "timeout"."""
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        if not only_output:
            poller.register(self._replies, select.POLLIN)
        look_at = float("inf") if only_output or self._processes is None else time.monotonic() + _LOOK_S
        while True:
            events = dict(poller.poll(_milliseconds(min(deadline, look_at))))
            if time.monotonic() >= look_at:
                if (excess := self._processes.excess(self._limits)) is not None:
                    self._excess = excess
                    return "excess", None
                look_at = time.monotonic() + _LOOK_S
            if self._output in events:
                data = _read(self._output)
                if data == b"":
                    poller.unregister(self._output)
                collected.add(data or b"")
                if collected.total > self._limits.output_kib * 1024 * _FLOOD:
                    return "flood", None
            if self._replies in events:
                data = _read(self._replies)
                if data == b"":
                    return "ended", None
                self._frame += data or b""
                complete, frame = self._take_frame()
                if complete:
                    return ("malformed", None) if frame is _MALFORMED else ("frame", frame)
            if only_output and (self._output not in events or data == b""):
                return "timeout", None
            if not only_output and time.monotonic() >= deadline:
                return "timeout", None

    def _take_frame(self) -> tuple[bool, Any]:
        if len(self._frame) < 4:
            return False, None
        size = int.from_bytes(self._frame[:4], "big")
        if size > _MAX_FRAME:
            return True, _MALFORMED
        if len(self._frame) < 4 + size:
            return False, None
        if len(self._frame) > 4 + size:  # one answer to one request
            return True, _MALFORMED
        body = bytes(self._frame[4:])
        self._frame.clear()
        try:
            return True, json.loads(body)
        except (ValueError, RecursionError):
            return True, _MALFORMED

    def _reason(self, state: str, duration_s: float) -> str:
        """Why there is no answer, as the model is told."""
        if state == "timeout":
            return f"stopped after {duration_s:.1f} s, its time was over"
        if state == "flood":
            return f"stopped: it wrote more than {self._limits.output_kib * _FLOOD // 1024} MiB of output"
        if state == "excess":
            return f"stopped: {self._excess}"
        if state != "ended":
            return "the interpreter's answer could not be read"
        code = self.exit_code()
        number = -code if code is not None and code < 0 else (code or 0) - 128  # bubblewrap's form
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return f"the interpreter was stopped: it used up its {self._limits.cpu_s} s of processor time or its memory"
        if number in signal.Signals._value2member_map_:
            return f"the interpreter crashed ({signal.Signals(number).name})"
        return "the interpreter ended" + (f" with exit code {code}" if code else "")


class _Output:
    """The first part of what a call wrote, and the size of the rest."""

    def __init__(self, limits: Limits):
        self._limit = limits.output_kib * 1024
        self._kept = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self._kept += data[: max(0, self._limit - len(self._kept))]
        self.total += len(data)

    def text(self) -> str:
        text = self._kept.decode("utf-8", "replace")
        cut = self.total - len(self._kept)
        return f"{text}\n[... {cut:,} more bytes of output cut ...]\n" if cut else text


_MALFORMED = object()


def _frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


def _is_reply(frame: Any, request_id: str) -> bool:
    return (
        isinstance(frame, dict)
        and frame.keys() == {"id", "error"}
        and frame["id"] == request_id
        and isinstance(frame["error"], str | None)
    )


def _read(descriptor: int) -> bytes | None:
    """What is there; b"" at the end of the pipe, None if nothing is there yet."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _at_end(descriptor: int) -> bool:
    while data := _read(descriptor):
        del data
    return data == b""


def _milliseconds(deadline: float) -> float:
    return min(max(0.0, (deadline - time.monotonic()) * 1000), 3_600_000)
