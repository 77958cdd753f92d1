"""Buffers in Ray actors, on a real local cluster."""

import functools
import os
import signal
import threading

import pytest
import torch

from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    RandomSampler,
    RayReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from llmrl.errors import DeadlineError, WorkerError
from tests.support.buffers import check_errors_of_proxies, check_priorities_of_proxies, check_proxy
from tests.support.buffers import numbered as rows
from tests.support.processes import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
DEADLINE_S = 240.0


@pytest.fixture
def make(cluster):
    """Buffers that take no CPU from the cluster's two, and end with the test."""
    made = []

    def build(*arguments, **keywords):
        keywords = {"remote_config": {"num_cpus": 0}, "timeout_s": DEADLINE_S, **keywords}
        made.append(RayReplayBuffer(*arguments, **keywords))
        return made[-1]

    yield build
    for buffer in made:
        buffer.close()


def test_a_buffer_is_used_in_its_actor(make, tmp_path):
    buffer = make(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=functools.partial(LazyTensorStorage, 20),
        sampler=SamplerWithoutReplacement,
        batch_size=4,
    )
    assert buffer.apply(lambda _: os.getpid()) != os.getpid()
    state = check_proxy(buffer, tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=4)
    other.load_state_dict(state)
    assert torch.equal(other[:]["number"], buffer[:]["number"])
    assert torch.equal(other.sample()["number"], buffer.sample()["number"])
    assert buffer.append_transform(lambda batch: batch.set("number", -batch["number"])) is buffer
    assert buffer[1]["number"] == -1
    assert buffer.set_sampler(RandomSampler) is None
    assert buffer.apply(lambda there: type(there.sampler).__name__) == "RandomSampler"
    assert str(buffer.apply(lambda _: os.getpid())) in repr(buffer)


def test_priorities_and_ragged_rows_travel(make):
    masses = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "storage": functools.partial(LazyStackStorage, 10)}
    check_priorities_of_proxies(make(replay_buffer_cls=TensorDictPrioritizedReplayBuffer, batch_size=6, **masses))


def test_other_tasks_use_the_same_buffer(cluster, make):
    buffer = make(storage=functools.partial(LazyTensorStorage, 100))

    @cluster.remote(num_cpus=1)
    def write(buffer, first):
        buffer.extend(rows(first, 5))
        return len(buffer)

    lengths = cluster.get([write.remote(buffer, 100 * number) for number in range(6)], timeout=DEADLINE_S)
    assert max(lengths) == len(buffer) == 30
    numbers = buffer[:]["number"]
    assert sorted(numbers.tolist()) == [100 * task + row for task in range(6) for row in range(5)]
    assert torch.equal(buffer[:]["next", "reward"], numbers / 2)


def test_errors_of_the_buffer_reach_the_caller_unchanged(make):
    buffer, _ = check_errors_of_proxies(make)
    with pytest.raises(TypeError, match="storag"):
        make(storag=LazyTensorStorage)
    with pytest.raises(ValueError, match="positive"):
        make(timeout_s=0)
    with pytest.raises(AttributeError, match="update_tensordict_priority"):
        buffer.update_tensordict_priority(rows(0, 1))


def test_an_answer_that_does_not_come_in_time_names_the_actor(make):
    buffer = make()
    buffer.timeout_s = 0.2
    with pytest.raises(DeadlineError, match=r"Ray actor \w+ \(process \d+ on .*timeout_s=0\.2"):
        buffer.apply(lambda _: threading.Event().wait(10.0))
    with pytest.raises(DeadlineError, match=r"not placed yet.*remote_config"):
        make(remote_config={"num_cpus": 64}, timeout_s=1.0)


def test_close_ends_the_actor_and_its_death_is_an_error(make):
    buffer = make()
    process = buffer.apply(lambda _: os.getpid())
    buffer.close()
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        len(buffer)
    wait_until(lambda: not os.path.exists(f"/proc/{process}"), DEADLINE_S)
    buffer = make()
    os.kill(buffer.apply(lambda _: os.getpid()), signal.SIGKILL)
    with pytest.raises(WorkerError, match="has ended"):
        len(buffer)
