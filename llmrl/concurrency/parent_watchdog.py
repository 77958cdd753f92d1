"""Ends a process when the one that it works for has ended: an engine's process, or a rank of a run."""

from __future__ import annotations

import os
import select
import threading

OWNER = "LLMRL_ENGINE_OWNER"  # the environment variable with the owner's process id, set for an engine's process


def follow(owner: int | None = None) -> None:
    """Ends this process when the process ``owner`` ends, also by a signal; at once if it has ended already.

    Without ``owner`` it is the process that the variable `OWNER` names. Without an owner, or on a system that cannot
    wait for a process by its number, nothing happens.
    """
    owner = int(os.environ.get(OWNER, "0")) if owner is None else owner
    if owner in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        process = os.pidfd_open(owner)  # and not its number, which another process may get
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a sandbox that forbids the call
        return
    exit_after(process, select.POLLIN)


def follow_launcher() -> None:
    """In a process that torchrun started: ends it when torchrun ends. Elsewhere nothing happens."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow(os.getppid())


def exit_after(descriptor: int, event: int) -> None:
    """Ends this process at an ``event`` (of `select.poll`) of the file, also while the process hangs elsewhere."""

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, event)
        poller.poll()
        os._exit(1)  # there is no process left to report to

    threading.Thread(target=wait, name="llmrl-parent-watchdog", daemon=True).start()
