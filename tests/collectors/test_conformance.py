"""The promises of every collector whose workers are processes: of this machine, of others, or actors of Ray.

What only one kind does is tested in `test_multi_collectors`, `test_distributed_collectors` and `test_ray_collectors`.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from llmrl.collectors.distributed import DistributedDataCollector, RayCollector, RPCDataCollector
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers import RayReplayBuffer
from llmrl.errors import ConfigError, DeadlineError, WeightSyncError, WorkerError
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import raises_within, wait_until
from tests.support.worker_collectors import collectors, pids


@dataclass(frozen=True)
class Kind:
    """A class of collectors, and where its kind of workers shows."""

    cls: type
    options: dict[str, Any] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)


RAY = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]
KINDS = {
    "sync": Kind(MultiSyncDataCollector),
    "async": Kind(MultiaSyncDataCollector),
    "distributed": Kind(DistributedDataCollector, {"launcher": "mp"}),
    "rpc": Kind(RPCDataCollector, {"launcher": "mp"}, [pytest.mark.slow]),
    "ray": Kind(RayCollector, {"remote_configs": {"num_cpus": 0}}, RAY),
}
NAMED = "(worker|collector) 1 of 2"  # as actors are called
KILLED = rf"(?s){NAMED}.*(was killed by SIGKILL|it has ended)"


@pytest.fixture(params=[pytest.param(name, marks=kind.marks) for name, kind in KINDS.items()])
def kind(request):
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return KINDS[request.param]


@pytest.fixture
def make(kind):
    with collectors(kind.cls, **kind.options) as make:
        yield make


@pytest.fixture
def buffer(kind):
    """A buffer that collectors of this kind write into."""
    if kind.cls is not RayCollector:
        yield ReplayBuffer(storage=LazyTensorStorage(10_000), shared=kind.options == {})
        return
    remote = {"remote_config": {"num_cpus": 0}, "timeout_s": 60}
    rows = RayReplayBuffer(storage=functools.partial(LazyTensorStorage, 10_000), **remote)
    yield rows
    rows.close()


def failing(fault: str, at: int = 5):
    return [functools.partial(CountingEnv, 10), functools.partial(CountingEnv, 10, fault=fault, at=at)]


def seed_after(count: int, seed: int) -> int:
    for _ in range(count):
        seed = CountingEnv().set_seed(seed)
    return seed


# --- batches, weights and state ---


def test_rows_are_those_of_one_collector_in_trajectories_of_their_own_and_every_frame_is_counted(make):
    one = make(total_frames=48)
    assert len(one) == 4
    seen: dict[int, list[float]] = {}
    for batch in one:
        assert batch.numel() == 12
        assert batch.names[-1] == "time"
        for row in batch.reshape(-1).unbind(0):
            seen.setdefault(int(row["collector", "traj_ids"]), []).append(row)
    expected = SyncDataCollector(CountingEnv, Scale(), frames_per_batch=4).next().exclude("collector")
    for rows in seen.values():
        assert (torch.stack(rows).exclude("collector") == expected[: len(rows)]).all()
    assert sum(map(len, seen.values())) == 48
    assert one.counters == {"produced": 48, "delivered": 48, "dropped": 0}


def test_rows_carry_the_version_that_made_them_and_weights_that_do_not_fit_change_nothing(make):
    policy = Scale()
    one = make(policy=policy, total_frames=-1, track_policy_version=True)

    def check_until(version):
        def is_there():
            batch = one.next()
            assert (batch["action"].flatten() == batch["policy_version"].flatten() + 1).all()
            return (batch["policy_version"] == version).all()

        wait_until(is_there)  # what was collected before may come first

    check_until(0)
    one.update_policy_weights_(Scale(2.0))
    one.update_policy_weights_({"scale": torch.tensor(3.0)})
    check_until(2)
    for wrong in ({"scale": torch.zeros(2)}, {"other": torch.zeros(())}):
        with pytest.raises(WeightSyncError, match=r"scale|other"):
            one.update_policy_weights_(wrong)
    assert one.policy_version == 2
    policy.scale.data.fill_(4)
    one.update_policy_weights_()
    check_until(3)
    with pytest.raises(ConfigError, match=r"worker_ids .*\[2, -1\]"):
        one.update_policy_weights_(worker_ids=[0, 2, -1])


def test_a_state_is_gone_on_from_and_a_seed_is_derived_per_worker(make):
    one = make(total_frames=-1)
    one.next()
    one.update_policy_weights_(Scale(2.0))
    assert one.set_seed(7) == seed_after(2, 7)
    state = one.state_dict()
    assert {"worker0", "worker1"} <= set(state)
    assert (state["frames"], state["iter"], state["version"]) == (12, 1, 1)
    one.update_policy_weights_(Scale(5.0))
    one.next()
    one.load_state_dict(state)
    again = one.state_dict()
    assert (again["frames"], again["iter"], one.policy_version) == (12, 1, 1)
    wait_until(lambda: (one.next()["action"] == 2).all())  # what was collected before may come first
    with pytest.raises(ConfigError, match="worker1"):
        one.load_state_dict({name: value for name, value in state.items() if name != "worker1"})


@pytest.mark.slow
def test_a_worker_may_have_processes_of_its_own(make, kind):
    if "Multi" in kind.cls.__name__:
        pytest.skip("its workers are processes of this machine")
    nested = {"collector_class": MultiSyncDataCollector, "num_workers_per_collector": 2}
    one = make(sync=True, total_frames=-1, track_policy_version=True, **nested)
    ids = one.next()["collector", "traj_ids"].reshape(4, 3)
    assert [len(row.unique()) for row in ids] == [1] * 4
    assert len(ids.unique()) == 4
    one.update_policy_weights_(Scale(4.0))
    batch = one.next()
    assert (batch["action"] == 4).all()
    assert (batch["policy_version"] == 1).all()
    one.load_state_dict(one.state_dict())
    assert (one.next()["action"] == 4).all()


# --- in the background ---


def test_a_buffer_is_filled_until_the_shutdown_and_a_pause_takes_weights_states_and_seeds(make, buffer):
    one = make(envs=[functools.partial(CountingEnv, cost_s=0.001)] * 2, replay_buffer=buffer, total_frames=-1)
    one.start()
    for call in (one.start, one.next):
        with pytest.raises(ConfigError, match="already"):
            call()
    wait_until(lambda: len(buffer) > 60)
    with one.pause(), one.pause():
        one.update_policy_weights_(Scale(2.0))
        one.update_policy_weights_(Scale(-1.0))
        assert {"worker0", "worker1"} <= set(one.state_dict())
        assert one.set_seed(7) == seed_after(2, 7)
        count = one.counters["produced"]
        one.state_dict()  # an answer of each worker later
        assert one.counters["produced"] == count
    wait_until(lambda: one.counters["delivered"] > count + 60)
    one.async_shutdown()
    counts = one.counters
    assert counts["delivered"] == buffer.write_count
    assert counts["produced"] == counts["delivered"] + counts["dropped"]
    rows = buffer[:]
    assert set(rows["action"].flatten().tolist()) == {1.0, -1.0}
    assert (rows["next", "reward"] == rows["next", "observation"] + rows["action"]).all()
    with pytest.raises(WorkerError, match="shut down"):
        one.update_policy_weights_()


def test_a_worker_that_is_killed_in_the_background_is_warned_of_and_named_at_the_shutdown(make, buffer, kind):
    one = make(envs=[functools.partial(CountingEnv, 1000, cost_s=0.001)] * 2, replay_buffer=buffer, total_frames=-1)
    one.start()
    wait_until(lambda: len(buffer) >= 24)
    with pytest.warns(UserWarning, match=NAMED):
        kill_and_wait(one, kind)
    for call in (one.async_shutdown, one.update_policy_weights_):
        with pytest.raises(WorkerError, match=KILLED):
            call()
    rows = buffer[:]
    assert (rows["next", "reward"] == rows["next", "observation"] + 1).all()
    buffer.extend(rows[:4])  # the lock is free


def kill_and_wait(one, kind) -> None:
    """Until what watches the workers has warned."""
    watchers = [thread for thread in threading.enumerate() if thread.name.endswith("-watch")]
    os.kill(pids(one)[1], signal.SIGKILL)
    if kind.cls in (DistributedDataCollector, RPCDataCollector):
        wait_until(lambda: not one.background.is_running, 60)
    for watcher in watchers:
        watcher.join(60)


# --- what fails ---


@pytest.mark.parametrize("at", [0, 5])
def test_what_an_env_raises_is_raised_here_with_worker_and_traceback(make, at):
    one = make(envs=failing("raise", at), total_frames=-1)
    with raises_within(50, WorkerError, rf"(?s){NAMED}.*ValueError: the env failed at {at}") as caught:
        [one.next() for _ in range(10**6)]  # the other worker goes on
    assert "counting_env.py" in str(caught.value)
    for call in (one.next, one.update_policy_weights_, one.state_dict):
        with pytest.raises(WorkerError, match=NAMED):
            call()


def test_a_killed_worker_is_named(make):
    one = make(envs=failing("kill"), total_frames=-1)
    with raises_within(50, WorkerError, KILLED):
        [one.next() for _ in range(10**6)]


def test_an_env_that_never_returns_is_named(make):
    one = make(envs=failing("hang"), timeout_s=4.0, total_frames=-1)
    with raises_within(50, DeadlineError, rf"{NAMED}.*nothing for 4 s.*timeout_s"):
        [one.next() for _ in range(10**6)]


def test_an_env_that_cannot_be_made_is_named(make, kind):
    def broken():
        raise OSError("no display")

    error, words = (OSError, "") if kind.cls is RayCollector else (WorkerError, rf"{NAMED}.*OSError: ")
    with pytest.raises(error, match=f"{words}no display"):
        make(envs=[CountingEnv, broken])


class Unpicklable(Scale):
    def __reduce__(self):
        raise RuntimeError("a handle of a device")


REFUSED = {
    "a misspelt argument": ({"frames_per_bach": 12}, TypeError, "Did you mean 'frames_per_batch'"),
    "no frames": ({"frames_per_batch": 0}, ConfigError, "frames_per_batch"),
    "frames of one worker for two": ({"frames_per_batch": [4]}, ConfigError, "frames_per_batch"),
    "a policy beside its factory": ({"policy": Scale(), "policy_factory": Scale}, TypeError, "exclude each other"),
    "a policy that cannot be sent": ({"policy": Unpicklable()}, ConfigError, "policy_factory"),
    "an interruptor": ({"interruptor": nn.Identity()}, (ConfigError, NotImplementedError), "interruptor"),
    "no worker": ({"envs": []}, ConfigError, "number of workers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_used_are_refused(make, case):
    options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        make(**options)
