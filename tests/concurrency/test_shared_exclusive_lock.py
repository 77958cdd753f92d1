"""The lock of an engine: equal keys share it, an update has it alone, and none is starved."""

from __future__ import annotations

import threading
import time

import pytest

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.errors import DeadlineError

PATIENCE_S = 60.0  # a test that would wait for ever fails after so long


def later():
    return time.monotonic() + PATIENCE_S


def thread(target):
    started = threading.Thread(target=target, daemon=True)
    started.start()
    return started


def until(condition):
    end = later()
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.002)


@pytest.fixture
def lock():
    return SharedExclusiveLock("Engine")


def test_requests_share_it_and_an_update_has_it_alone(lock):
    both, order = threading.Barrier(3), []

    def request():
        with lock.holding("request", later(), "generating"):
            both.wait(PATIENCE_S)  # passes only if two are inside at the same time
            both.wait(PATIENCE_S)
            order.append("request")

    def update():
        with lock.holding(object(), later(), "updating"):
            order.append(("update", lock.num_holders))

    threads = [thread(request), thread(request)]
    both.wait(PATIENCE_S)
    threads.append(thread(update))
    until(lambda: lock.num_waiting)
    both.wait(PATIENCE_S)
    for one in threads:
        one.join(PATIENCE_S)
    assert order == ["request", "request", ("update", 1)]
    assert lock.num_holders == 0


def test_requests_that_come_after_an_update_wait_behind_it(lock):
    """Else a stream of requests would keep it out for ever."""
    leave, order = threading.Event(), []

    def enter(key, name):
        with lock.holding(key, later(), name):
            order.append(name)

    def first():
        with lock.holding("request", later(), "first"):
            leave.wait(PATIENCE_S)

    threads = [thread(first)]
    until(lambda: lock.num_holders)
    for number, (key, name) in enumerate([(object(), "update"), ("request", "second"), ("request", "third")]):
        threads.append(thread(lambda key=key, name=name: enter(key, name)))
        until(lambda number=number: lock.num_waiting == number + 1)
    assert order == []
    leave.set()
    for one in threads:
        one.join(PATIENCE_S)
    assert order[0] == "update"
    assert sorted(order[1:]) == ["second", "third"]


def test_a_deadline_names_the_phase_and_leaves_nothing_behind(lock):
    entered = []

    def request():
        with lock.holding("request", later(), "generating"):
            entered.append(lock.num_holders)

    with lock.holding("request", later(), "generating"):
        update = lock.holding(object(), time.monotonic() + 0.05, "loading version 3")
        with pytest.raises(DeadlineError, match=r"Engine: loading version 3 must begin .*: 1 other calls"), update:
            pass
        thread(request).join(PATIENCE_S)
        assert entered == [2]  # the update that gave up holds back no request
    assert lock.num_holders == 0


def test_the_hook_runs_only_where_there_are_holders_to_wait_for(lock):
    leave, waiting = threading.Event(), []

    def inside():
        with lock.holding("request", later(), "generating"):
            leave.wait(PATIENCE_S)

    def hook():
        waiting.append(lock.num_waiting)
        leave.set()

    running = thread(inside)
    until(lambda: lock.num_holders)
    with lock.holding(object(), later(), "updating", hook):
        running.join(PATIENCE_S)
    with lock.holding(object(), later(), "updating", hook):
        pass
    assert waiting == [1]
