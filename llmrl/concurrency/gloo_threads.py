"""Waits for gloo's threads to release the tensors of finished collectives."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # torch's name for the threads that run a gloo group's collectives
_COUNTED = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def wait_for_gloo_threads(timeout_s: float = 10.0) -> None:
    """Returns when every thread of this process's gloo groups is asleep; to be called after the last collective.

    Such a thread releases a collective's tensors after the caller has received the result, and needs the GIL for it.
    If the interpreter exits first, Python up to 3.13 ends the thread instead, which aborts the process ("terminate
    called without an active exception"). That happens if a group outlives its session: torch's caches keep the groups
    of a DeviceMesh until the process ends.

    Gives up after ``timeout_s`` seconds; returns at once if there is no /proc.
    """
    deadline = time.monotonic() + timeout_s
    before, times_equal = None, 0
    while times_equal < 3 and (now := _gloo_threads()) and time.monotonic() < deadline:
        # The GIL is free while this thread sleeps. A thread that waits for the GIL wakes up after each switch interval,
        # even if a third thread got the GIL, so its switch counts change.
        asleep = now == before and all(state.startswith("S") for state, *_ in now.values())
        before, times_equal = now, times_equal + 1 if asleep else 0  # three: a thread may sleep between two tasks
        time.sleep(max(0.01, 2 * sys.getswitchinterval()))


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """State and context switch counts of each gloo thread; the counts are unchanged if it has not run."""
    found = {}
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            status = dict(line.split("\t", 1) for line in (folder / "status").read_text().splitlines())
            if status["Name:"] == _NAME:
                found[folder.name] = tuple(status[name] for name in _COUNTED)
    return found
