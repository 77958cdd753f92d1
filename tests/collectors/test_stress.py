"""Writers into a shared buffer, readers and weight updates at the same time; workers that are killed in the middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.errors import WorkerError
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import is_running, raises_within


class Uniform(nn.Module):
    """All weights are one number, which is the action; ``torn`` where they are not."""

    in_keys, out_keys = ("observation",), ("action", "torn")

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(5000)) for _ in range(4))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        value = self.weights[0][:1].detach().clone()
        torn = torch.stack([(weight != value).any() for weight in self.weights]).any()
        return td.set("action", value).set("torn", torn.reshape(1))


def check(rows: TensorDictBase) -> None:
    assert not rows["torn"].any()
    assert (rows["action"].flatten() == rows["policy_version"]).all()  # version n has the weights n
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    assert (rows["next", "reward"] == rows["next", "observation"] + rows["action"]).all()


@pytest.mark.parametrize("seconds", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_readers_and_weights_in_the_middle_of_writes_see_nothing_half_done(seconds: float):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=64, shared=True)  # is written over many times
    collector = MultiaSyncDataCollector(
        [lambda: CountingEnv(30, cost_s=1e-4)] * 2,
        Uniform(),
        frames_per_batch=20,
        replay_buffer=buffer,
        track_policy_version=True,
    )
    workers = [worker.process.pid for worker in collector._pool.workers]
    try:
        collector.start()
        end, versions, reads = time.monotonic() + seconds, 0, 0
        seen = 0  # the newest version in the buffer: a busy machine needs longer until there is something to check
        while time.monotonic() < end or min(versions - 2, reads, seen + 1) < 3:
            assert time.monotonic() < end + 120, (versions, reads, seen)
            versions += 1
            weights = {f"weights.{number}": torch.full((5000,), float(versions)) for number in range(4)}
            collector.update_policy_weights_(weights)
            for weight in weights.values():
                weight.fill_(-1.0)  # a worker that still read here would notice
            if len(buffer):
                check(buffer.sample())
                check(rows := buffer[:])
                reads, seen = reads + 1, rows["policy_version"].max().item()
        with collector.pause():
            start = buffer.write_count % 1000 if len(buffer) == 1000 else 0
            rows = buffer[:].roll(-start, 0)  # the oldest one first
        check(rows)
        for worker in range(2):
            mine = rows["collector", "traj_ids"] % 2 == worker
            assert (rows["policy_version"][mine].diff() >= 0).all()
        assert reads > 2
        assert rows["policy_version"].max() > 1
        collector.async_shutdown()
        counts = collector.counters
        assert counts["delivered"] == buffer.write_count
        assert counts["produced"] == counts["delivered"] + counts["dropped"]
        buffer.extend(rows[:3])  # the lock is free
    finally:
        collector.shutdown()
    assert not any(map(is_running, workers))


# --- a worker that is killed ---


def die_in(worker: int) -> None:
    if multiprocessing.current_process().name == f"llmrl-collector-{worker}":
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyStorage(LazyTensorStorage):
    """Its worker 0 dies with the rows written, the lock held, and nothing counted."""

    def set(self, cursor, data, **options):
        super().set(cursor, data, **options)
        die_in(0)


class DeadlyScale(Scale):
    """Its worker 0 dies as soon as weights are written into it."""

    def state_dict(self, *args, **kwargs):
        die_in(0)
        return super().state_dict(*args, **kwargs)


def test_a_worker_that_is_killed_with_the_lock_of_the_buffer_is_named_and_leaves_it_free():
    buffer = ReplayBuffer(storage=DeadlyStorage(1000), batch_size=8, shared=True)
    collector = MultiaSyncDataCollector([CountingEnv] * 2, Scale(), frames_per_batch=12, replay_buffer=buffer)
    workers = [worker.process.pid for worker in collector._pool.workers]
    with raises_within(50, WorkerError, r"worker 0 of 2.*was killed by SIGKILL"):
        [collector.next() for _ in range(100)]
    assert not any(map(is_running, workers))
    rows, count = buffer[:], buffer.write_count
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    buffer.extend(rows[:5])
    assert buffer.write_count == count + 5


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_a_worker_that_is_killed_while_it_takes_weights_is_named(cls):
    collector = cls([CountingEnv] * 2, DeadlyScale(), frames_per_batch=12)
    workers = [worker.process.pid for worker in collector._pool.workers]
    collector.next()

    def push() -> None:
        for version in range(100):
            collector.update_policy_weights_({"scale": torch.tensor(float(version))})
            collector.next()

    with raises_within(50, WorkerError, "worker 0"):
        push()
    assert not any(map(is_running, workers))
