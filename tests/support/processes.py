"""Processes as /proc shows them, and waiting for them to end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Polls until the condition holds; fails where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {timeout_s:g} s"
        time.sleep(0.01)


@contextmanager
def raises_within(seconds: float, error: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo]:
    """`pytest.raises`, and the block took no longer."""
    start = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert time.monotonic() - start < seconds


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_in(namespace: str) -> list[int]:
    """The running processes of a pid namespace, named as the link /proc/<pid>/ns/pid names it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "pid") == namespace and is_running(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[tuple[int, str]]:
    """The processes that a process started, and theirs: numbers and command lines."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        children.setdefault(parent, []).append((int(folder.name), command))
    found, parents = [], [pid]
    while parents:
        found += (below := children.get(parents.pop(), []))
        parents += [child for child, _ in below]
    return found
