"""Names the rank that others wait for in a collective, before the backend's own deadline.

NCCL's watchdog ends a process without an exception, so that nothing would name the late rank, close the logs or stop
the engines. A thread of each rank therefore compares how many collectives the ranks have begun, through the store.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from llmrl.errors import DeadlineError

_SHARE = 0.9  # of the deadline, after which the late rank is named
_PERIOD_S = 5.0  # between two looks, at most
_UNWINDING_S = 60.0  # for a rank to end after its exception


class LateRanks:
    """Calls ``on_late`` with a message, once, if this rank has waited for another one for most of ``timeout_s``; and
    with an event that `close` sets.

    counters  for each group of ranks: its members, and the number of collectives that this rank has begun in it
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        counters: Mapping[str, tuple[Sequence[int], Callable[[], int]]],
        timeout_s: float,
        on_late: Callable[[str, threading.Event], None],
    ) -> None:
        self._store, self._rank, self._counters = store, rank, counters
        self._timeout_s, self._limit_s = timeout_s, _SHARE * timeout_s
        self._on_late = on_late
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="llmrl-late-ranks", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _watch(self) -> None:
        begun: dict[str, tuple[int, float]] = {}  # number of collectives, and since when
        with suppress(RuntimeError):  # the store ends with the first rank
            while not self._end.wait(min(_PERIOD_S, self._limit_s / 20)):
                now = time.monotonic()
                for name, (_, count) in self._counters.items():
                    if begun.get(name, (-1,))[0] != (number := count()):
                        begun[name] = number, now
                self._store.set(
                    f"begun/{self._rank}", json.dumps({name: number for name, (number, _) in begun.items()})
                )
                for name, (number, since) in begun.items():
                    if now - since > self._limit_s and (late := self._behind(name, number)) and not self._end.is_set():
                        return self._on_late(late_message(late, self._timeout_s), self._end)

    def _behind(self, name: str, number: int) -> list[int]:
        """The members of a group that have not begun collective ``number``, in which this rank is."""
        behind = []
        for rank in self._counters[name][0]:
            key = f"begun/{rank}"
            theirs = json.loads(self._store.get(key)) if self._store.check([key]) else {}
            if theirs.get(name, 0) < number:
                behind.append(rank)
        return behind


def late_message(ranks: Sequence[int], timeout_s: float) -> str:
    names = " and ".join(f"rank {rank}" for rank in ranks)
    return (
        f"session: every rank must take part within parallel.timeout_s = {timeout_s:g} s: got nothing from {names}, "
        "stopped, hanging or slow; end it or raise parallel.timeout_s, then resume."
    )


def counters_of(groups: Sequence[dist.ProcessGroup]) -> dict[str, tuple[list[int], Callable[[], int]]]:
    """The ``counters`` of `LateRanks` for torch's groups, of NCCL or gloo."""
    return {
        group.group_name: (dist.get_process_group_ranks(group), group._get_sequence_number_for_group)
        for group in groups
    }


def raise_in_main(message: str, left: threading.Event, aborted: Sequence[dist.ProcessGroup]) -> None:
    """Raises DeadlineError in the main thread, and ends what it waits for in the ``aborted`` groups, which are those of
    a GPU: gloo has its own deadline. Exits if the session is not ``left`` by then.
    """

    class Late(DeadlineError):  # such an exception is made without arguments
        def __init__(self) -> None:
            super().__init__(message)

    Late.__name__ = Late.__qualname__ = DeadlineError.__name__
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(Late))
    if aborted:  # said now too, in case that this ends the process
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    for group in aborted:
        with suppress(RuntimeError):
            group.abort()
    if left.wait(_UNWINDING_S):
        return
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(1)
