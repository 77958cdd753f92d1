"""What keeps an engine's process from outliving the one that it works for, however that one ends."""

from __future__ import annotations

import os
import select
import threading

__all__ = ["OWNER", "follow"]

OWNER = "LLMRL_ENGINE_OWNER"  # the variable with the owner's process id, set for a process while it is started


def follow() -> None:
    """From now on this process ends when its owner does, killed or not; at once where that is so already.

    Does nothing in a process that has no owner, is its own, or runs where processes cannot be waited for by number.
    """
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return
    threading.Thread(target=_end_with, args=[watched], name="llmrl-leash", daemon=True).start()


def _end_with(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os._exit(1)  # nobody is left to say anything to
