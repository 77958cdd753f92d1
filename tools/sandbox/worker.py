"""Runs inside the sandbox: reads code from one pipe, runs it in one namespace, answers on another pipe.

"Fresh" code runs in a process forked for it, so that its changes to modules do not last. This file is started as text
(``python -c``), so it imports only the standard library. A message is one line of JSON.

    host -> worker   {"id": ..., "code": ..., "fresh": bool}
    worker -> host   {"id": "ready", "error": null} once, then for each request {"id": ..., "error": traceback or null}

Output of the code goes to the output pipe, file descriptors 1 and 2. The code runs in this process and could find the
reply pipe. It could only forge the answer to its own call, because an answer must repeat the random id of its request.
In its own process namespace this process stops itself after each answer; the host resumes it with the next request.
Arguments: request pipe, reply pipe, limits as JSON, and "contained" if it has its own process namespace.
"""

import ast
import builtins
import io
import json
import linecache
import os
import resource
import select
import signal
import sys
import traceback
import types
from json import dumps
from os import _exit, getpid, kill, write  # imported by name: the code may replace module attributes
from time import sleep

MAX_ERROR_CHARS = 16_000
MAX_ANSWER = 1 << 20  # bytes


def serve(requests: int, replies: int, limits: dict[str, int], contained: bool) -> None:
    own_pid = getpid()
    if contained and own_pid != 2:  # otherwise the clean-up after each call would kill other processes
        sys.exit(f"expected to be process 2 of its namespace, not {own_pid}")
    set_limits(limits)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    own_module = sys.modules["__main__"]  # kept alive: the code gets another module under that name
    namespace = new_namespace()
    stream = io.BufferedReader(io.FileIO(requests, closefd=False))
    answer(replies, "ready", None, contained)
    number = 0
    while request := receive(stream):
        number += 1
        if request["fresh"]:
            error = run_apart(request["code"], f"<code {number}>", limits, close=(requests, replies))
        else:
            open_output()
            error = None
            try:
                error = run(request["code"], f"<code {number}>", namespace, limits)
            finally:
                if getpid() != own_pid:
                    _exit(0)  # a child that the code forked, and that ran to the end of the code
            # A trace function set by the code would otherwise see and slow down the lines below.
            sys.settrace(None)
        if contained:
            end_children()
        answer(replies, request["id"], error, contained)
    del own_module


def run_apart(code: str, name: str, limits: dict[str, int], close: tuple[int, ...]) -> str | None:
    """Runs the code in a separate process. If that exits without an answer, this process exits with the same status."""
    answers, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        own_pid = getpid()
        for descriptor in (*close, answers):
            os.close(descriptor)
        open_output()
        try:
            error = run(code, name, new_namespace(), limits)
            if getpid() == own_pid:
                send(answer, "", error)
        finally:
            _exit(0)
    os.close(answer)
    # Processes that the code leaves behind may hold the pipe open, so the exit of its own process is watched as well.
    watched = [answers, *([os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else [])]
    data = b""
    while not data.endswith(b"\n") and len(data) <= MAX_ANSWER:
        ready = select.select(watched, [], [])[0]
        more = os.read(answers, 65536) if answers in ready else b""
        if not more:
            break
        data += more
    for descriptor in watched:
        os.close(descriptor)
    os.kill(pid, signal.SIGKILL)  # if it has not ended by itself
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        error = json.loads(data)["error"]
    except (ValueError, TypeError, KeyError):
        _exit(status if status >= 0 else 128 - status)
    return error if error is None else str(error)


def run(code: str, name: str, namespace: dict, limits: dict[str, int]) -> str | None:
    """Runs the code, prints the value of a final expression, and returns the traceback or None."""
    linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)  # the lines in tracebacks
    try:
        tree = ast.parse(code, name)
        # Mode "single" prints the value of a final expression, as an interactive interpreter does.
        last = ast.Interactive([tree.body.pop()]) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            exec(compile(last, name, "single"), namespace)
        return None
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        return f"SystemExit: {error.code}"
    except BaseException as error:
        return describe(error, limits)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:  # the code closed or replaced them
            pass


def describe(error: BaseException, limits: dict[str, int]) -> str:
    """The traceback as an interpreter would print it, starting at the code's own frames."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<code "):
        # Frames of this file are left out.
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-20))
    except BaseException:
        text = f"{type(error).__name__} (its text cannot be shown)"
    if isinstance(error, MemoryError):
        text = f"{text.rstrip()} (the limit is {limits['memory_mib']} MiB)"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 2]}\n[...]\n{text[-MAX_ERROR_CHARS // 2 :]}"
    return text.rstrip()


def new_namespace() -> dict:
    module = types.ModuleType("__main__")
    module.__builtins__ = builtins
    if not hasattr(builtins, "exit"):  # without the module "site"
        builtins.exit = builtins.quit = sys.exit
    sys.modules["__main__"] = module
    return module.__dict__


_kept: list[io.TextIOWrapper] = []  # a thread may be inside print, which holds no reference to its stream


def open_output() -> None:
    """Fresh, unbuffered streams for every call, so that output is kept even if the call is killed."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        _kept.append(stream)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def set_limits(limits: dict[str, int]) -> None:
    memory, file = limits["memory_mib"] << 20, limits["file_mib"] << 20
    for which, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 256),
        ("RLIMIT_FSIZE", file),
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_AS", memory),
    ):
        try:
            kind = getattr(resource, which)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # Sets the hard limit as well, because code could raise a soft limit again.
            resource.setrlimit(kind, (value, value))
        except (AttributeError, OSError, ValueError):
            if limits["strict"]:
                raise
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # too large a file raises OSError instead of killing the process
    try:
        with open("/proc/self/oom_score_adj", "w") as file_:
            file_.write("1000")  # if the machine runs out of memory, this process is killed first
    except OSError:
        pass


def end_children() -> None:
    """Kills the processes that the code started."""
    try:
        while True:
            # Repeated, and without waiting for a single process: a thread of the code may keep starting others.
            os.kill(-1, signal.SIGKILL)  # all of this namespace but the first process and this one
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                sleep(1e-4)
    except (ProcessLookupError, ChildProcessError):
        pass


def answer(replies: int, request_id: str, error: str | None, contained: bool) -> None:
    send(replies, request_id, error)
    if contained:
        kill(getpid(), signal.SIGSTOP)  # stops all threads that the code left


def send(descriptor: int, request_id: str, error: str | None) -> None:
    data = dumps({"id": request_id, "error": error}).encode() + b"\n"
    while data:
        data = data[write(descriptor, data) :]


def receive(stream: io.BufferedReader) -> dict:
    """The next request; exits if there is none or the code corrupted the pipe."""
    try:
        return json.loads(stream.readline())
    except BaseException:
        _exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4] == "contained")
