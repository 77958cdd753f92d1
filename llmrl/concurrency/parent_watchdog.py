"""Ends a process (an engine's, or a rank of a run) when its owner has ended."""

from __future__ import annotations

import multiprocessing.spawn
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OWNER = "LLMRL_ENGINE_OWNER"  # environment variable of an engine's process: the owner's process id


def follow(owner: int | None = None) -> None:
    """Ends this process when the process ``owner`` ends, however it ends; at once if it has ended already.

    ``owner`` is a process id; the default is read from the environment variable `OWNER`. Does nothing without an owner,
    and on systems without ``pidfd_open``.
    """
    owner = int(os.environ.get(OWNER, "0")) if owner is None else owner
    if owner in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        process = os.pidfd_open(owner)  # unlike the process id, it is never reused for another process
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a sandbox that forbids the call
        return
    exit_after(process, select.POLLIN)


@contextmanager
def followed() -> Iterator[None]:
    """Processes that multiprocessing spawns inside the block, in any thread, `follow` this one from their first line.

    For programs that reach llmrl's own code late: vLLM first imports for seconds, and then waits for its owner.
    """
    command = multiprocessing.spawn.get_command_line

    def with_follow(**arguments: Any) -> list[str]:
        words = command(**arguments)
        if "-c" in words:  # not in a frozen program
            # By path: the process sets up its module search path only after it has read what its owner sends.
            first = f"import runpy; runpy.run_path({__file__!r})['follow']({os.getpid()}); "
            words[words.index("-c") + 1] = first + words[words.index("-c") + 1]
        return words

    multiprocessing.spawn.get_command_line = with_follow
    try:
        yield
    finally:
        multiprocessing.spawn.get_command_line = command


def follow_launcher() -> None:
    """Ends this process when the torchrun that started it ends. Does nothing in a process without torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow(os.getppid())


def exit_after(descriptor: int, event: int) -> None:
    """Ends this process at an ``event`` (of `select.poll`) of a file descriptor, even if its other threads hang."""

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, event)
        poller.poll()
        os._exit(1)  # without cleanup: no process is left to report to

    threading.Thread(target=wait, name="llmrl-parent-watchdog", daemon=True).start()
