"""Waiting for gloo's threads to release the tensors of collectives that have ended."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # what torch calls the threads that compute a gloo group's collectives
_COUNTED = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def wait_for_gloo_threads(timeout_s: float = 10.0) -> None:
    """Returns when every thread of this process's gloo groups sleeps; to be called after the last collective.

    Such a thread releases a collective's tensors after the caller has got the result, and needs the GIL for it. If the
    interpreter ends before, Python up to 3.13 ends the thread instead, which aborts the process ("terminate called
    without an active exception"). That happens if a group outlives its session: torch's caches hold those of a
    DeviceMesh until the process ends.

    Gives up at the deadline; returns at once if there is no /proc.
    """
    deadline = time.monotonic() + timeout_s
    before, times_equal = None, 0
    while times_equal < 3 and (now := _gloo_threads()) and time.monotonic() < deadline:
        # The GIL is free while this thread sleeps. Another that waits for it wakes up after each switch interval, also
        # where the GIL has gone to a third, and is then seen to have run.
        asleep = now == before and all(state.startswith("S") for state, *_ in now.values())
        before, times_equal = now, times_equal + 1 if asleep else 0  # three times: one sleep may be a pause in its work
        time.sleep(max(0.01, 2 * sys.getswitchinterval()))


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """State of each thread, and how often it has been switched to: unchanged if it has not run."""
    found = {}
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            status = dict(line.split("\t", 1) for line in (folder / "status").read_text().splitlines())
            if status["Name:"] == _NAME:
                found[folder.name] = tuple(status[name] for name in _COUNTED)
    return found
