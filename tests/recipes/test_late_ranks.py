"""A rank that others wait for in a collective is named before the backend's deadline, and ends as by an exception."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from llmrl.errors import DeadlineError
from llmrl.train import late_ranks
from llmrl.train.late_ranks import LateRanks
from tests.support.processes import wait_until


class Ranks:
    """Ranks of one process with a store between them, each with its count of collectives in one group or more."""

    def __init__(self, begun, timeout_s=1.0, groups=None):
        self.begun, store, self.said = begun, dist.HashStore(), [[] for _ in begun]
        groups = groups or {"world": range(len(begun))}
        self.watches = [
            LateRanks(
                store,
                rank,
                {
                    name: (members, lambda rank=rank: self.begun[rank])
                    for name, members in groups.items()
                    if rank in members
                },
                timeout_s,
                lambda message, left, rank=rank: self.said[rank].append(message),
            )
            for rank in range(len(begun))
        ]

    def close(self):
        for watch in self.watches:
            watch.close()


def test_those_that_wait_name_the_ranks_that_have_begun_fewer_collectives():
    began = time.monotonic()
    ranks = Ranks([7, 6, 7, 5])
    wait_until(lambda: all(ranks.said[:3]), 30)
    assert time.monotonic() - began > 0.9
    ranks.close()
    said = "within parallel.timeout_s = 1 s: got nothing from rank 1 and rank 3, stopped"
    assert [said in " ".join(texts) for texts in ranks.said] == [True, False, True, False]
    assert "rank 3" in ranks.said[1][0], "it waits for rank 3 itself"
    assert ranks.said[3] == []


def test_ranks_that_are_busy_alike_or_go_on_in_time_are_not_late():
    idle = Ranks([3, 3])
    moving = Ranks([3, 3], timeout_s=2.0)
    apart = Ranks([4, 4, 2, 2], groups={"first": (0, 1), "second": (2, 3)})
    for step in range(8):
        time.sleep(0.3)
        moving.begun = [4 + step, 3 + step]  # one is always behind
    for ranks in (idle, moving, apart):
        ranks.close()
        assert ranks.said == [[] for _ in ranks.begun]


def test_the_main_thread_gets_an_exception_with_the_message_and_time_to_leave(monkeypatch):
    exits, left = [], threading.Event()
    monkeypatch.setattr(os, "_exit", exits.append)
    with pytest.raises(DeadlineError, match="rank 5 is late"):
        raised_while_busy("rank 5 is late", left)
    left.set()
    wait_until(lambda: not named_threads("raises"), 30)
    assert exits == []
    monkeypatch.setattr(late_ranks, "_UNWINDING_S", 0.2)
    with pytest.raises(DeadlineError, match="rank 6 is late"):
        raised_while_busy("rank 6 is late", threading.Event())
    wait_until(lambda: not named_threads("raises"), 30)
    assert exits == [1], "the exception did not end the session"


def raised_while_busy(message, left):
    threading.Thread(target=late_ranks.raise_in_main, args=(message, left, []), name="raises").start()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass


def named_threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]
