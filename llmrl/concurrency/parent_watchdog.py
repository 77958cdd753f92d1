"""Ends a process when the one that it works for has ended, however that ended: an engine's, or a rank's of a run."""

from __future__ import annotations

import os
import select
import threading

__all__ = ["OWNER", "follow", "follow_launcher"]

OWNER = (
    "LLMRL_ENGINE_OWNER"  # the variable with the owner's process id, set for an engine's process while it is started
)


def follow(owner: int | None = None) -> None:
    """From now on this process ends when ``owner`` does, killed or not; at once where that is so already.

    Without ``owner`` it is the process that the variable `OWNER` names. Does nothing in a process that has no owner, is
    its own, or runs where processes cannot be waited for by number.
    """
    owner = int(os.environ.get(OWNER, "0")) if owner is None else owner
    if owner in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return
    threading.Thread(target=_end_with, args=[watched], name="llmrl-parent-watchdog", daemon=True).start()


def follow_launcher() -> None:
    """In a process that torchrun started: it ends when torchrun does. Elsewhere nothing happens."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow(os.getppid())


def _end_with(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os._exit(1)  # no process is left to report to
