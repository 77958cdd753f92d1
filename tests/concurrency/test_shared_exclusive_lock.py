"""The lock of an engine: equal keys share it, an update holds it exclusively, in order of arrival."""

import threading
import time

import pytest

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.errors import DeadlineError
from tests.support.processes import wait_until
from tests.support.vllm import PATIENCE_S, BackgroundCall


def later():
    return time.monotonic() + PATIENCE_S


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

    calls = [BackgroundCall(request), BackgroundCall(request)]
    both.wait(PATIENCE_S)
    calls.append(BackgroundCall(update))
    wait_until(lambda: lock.num_waiting)
    both.wait(PATIENCE_S)
    for call in calls:
        call.result()
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

    calls = [BackgroundCall(first)]
    wait_until(lambda: lock.num_holders)
    for number, (key, name) in enumerate([(object(), "update"), ("request", "second"), ("request", "third")]):
        calls.append(BackgroundCall(lambda key=key, name=name: enter(key, name)))
        wait_until(lambda number=number: lock.num_waiting == number + 1)
    assert order == []
    leave.set()
    for call in calls:
        call.result()
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
        BackgroundCall(request).result()
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

    running = BackgroundCall(inside)
    wait_until(lambda: lock.num_holders)
    with lock.holding(object(), later(), "updating", hook):
        running.result()
    with lock.holding(object(), later(), "updating", hook):
        pass
    assert waiting == [1]
