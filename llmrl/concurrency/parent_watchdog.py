"""Ends a process (an engine's, or a rank of a run) when its owner has ended."""

from __future__ import annotations

import os
import select
import threading

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
