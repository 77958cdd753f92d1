"""Signals to a process group, and writing to a pipe with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time


def signal_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to the group of a process that was started with ``start_new_session`` and is not yet reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def write_all(descriptor: int, data: bytes, deadline: float) -> None:
    """Writes all of ``data`` to a non-blocking pipe.

    Raises  TimeoutError at the deadline (of `time.monotonic`), OSError if the reading end is closed
    """
    left = memoryview(data)
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    while left:
        if not poller.poll(poll_timeout(deadline)) and time.monotonic() >= deadline:
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(descriptor, left) :]


def poll_timeout(deadline: float) -> float:
    """Milliseconds until the deadline, at most an hour: the argument of ``poll``."""
    return min(max(0.0, (deadline - time.monotonic()) * 1000), 3_600_000)
