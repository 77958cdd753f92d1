"""Buffers in Ray actors, on a real local cluster."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.data.llm import History
from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RayReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from llmrl.errors import DataError, DeadlineError, WorkerError

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


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(number=number, next=TensorDict(reward=number / 2, batch_size=[count]), batch_size=[count])


def test_a_buffer_is_used_in_its_actor(make, tmp_path):
    buffer = make(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=functools.partial(LazyTensorStorage, 20),
        sampler=SamplerWithoutReplacement,
        batch_size=4,
    )
    assert buffer.apply(lambda _: os.getpid()) != os.getpid()
    assert buffer.extend(rows(0, 6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.add(rows(6, 1)[0]) == 6
    assert (len(buffer), buffer.write_count, buffer.batch_size) == (7, 7, 4)
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["number"], info["index"])
    batch["number"].fill_(-1)  # a batch is the caller's
    assert len(buffer.sample()) == 3
    assert sorted(torch.cat([batch["number"] for batch in buffer]).tolist()) == list(range(7))
    assert len(buffer.next()) == 4
    buffer[0] = rows(70, 1)[0]
    assert buffer[:2]["number"].tolist() == [70, 1]
    assert buffer["number"][0] == 70
    buffer.dumps(tmp_path)
    state = buffer.state_dict()
    buffer.empty()
    assert len(buffer) == 0
    buffer.loads(tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=4)
    other.load_state_dict(state)
    assert torch.equal(other[:]["number"], buffer[:]["number"])
    assert torch.equal(other.sample()["number"], buffer.sample()["number"])
    assert buffer.append_transform(lambda batch: batch.set("number", -batch["number"])) is buffer
    assert buffer[1]["number"] == -1
    assert buffer.set_sampler(RandomSampler) is None
    assert buffer.apply(lambda there: type(there.sampler).__name__) == "RandomSampler"
    assert str(buffer.apply(lambda _: os.getpid())) in repr(buffer)


def conversation(turns: int) -> TensorDict:
    history = History(role=["user", "assistant"] * turns, content=[f"turn {turn}" for turn in range(2 * turns)])
    ids = torch.arange(5 * turns)
    return TensorDict(
        history=TensorDict(full=history),
        tokens=TensorDict(full=ids),
        log_probs=TensorDict(full=-ids.float()),
        text=TensorDict(full="words " * turns),
        policy_version=torch.tensor(turns),
    )


def test_conversations_of_any_length_go_there_and_back(make):
    buffer = make(
        storage=functools.partial(LazyStackStorage, 16),
        sampler=functools.partial(SamplerWithoutReplacement, max_age=2),
        batch_size=4,
    )
    given = [conversation(turns) for turns in (1, 2, 3, 4)]
    buffer.extend(lazy_stack(given))
    batch = buffer.sample()
    assert sorted(batch["policy_version"].tolist()) == [2, 3, 4]  # at version 4, those of 1 are too old
    for row in batch.unbind(0):
        sent = given[int(row["policy_version"]) - 1]
        assert torch.equal(row["tokens", "full"], sent["tokens", "full"])
        assert torch.equal(row["log_probs", "full"], sent["log_probs", "full"])
        assert row["text", "full"] == sent["text", "full"]
        history = row["history", "full"]
        assert isinstance(history, History)
        assert list(history.content) == list(sent["history", "full"].content)
        assert list(history.role) == list(sent["history", "full"].role)
    buffer.apply(lambda there, version: setattr(there.sampler, "version", version), 6)
    assert buffer.sample()["policy_version"].tolist() == [4]


def test_priorities_are_set_from_here(make):
    buffer = make(
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        storage=functools.partial(LazyTensorStorage, 10),
        batch_size=16,
    )
    buffer.extend(rows(0, 4))
    batch = buffer[:]  # a sample might miss a row, which would keep its priority
    batch["td_error"] = (batch["index"] == 2).float()
    buffer.update_tensordict_priority(batch)
    assert buffer.sample()["number"].unique().tolist() == [2]
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    batch = buffer.sample()
    assert batch["number"].unique().tolist() == [0]
    assert batch["priority_weight"].tolist() == [1.0] * 16
    plain = make(
        storage=functools.partial(LazyTensorStorage, 4), sampler=functools.partial(PrioritizedSampler, 4, 0.5, 0.5)
    )
    plain.extend(rows(0, 4))
    assert len(plain.sample(3)) == 3


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


def test_errors_of_the_buffer_come_home_as_they_are(make):
    with pytest.raises(TypeError, match="storage must be"):
        make(storage=functools.partial(dict))
    with pytest.raises(TypeError, match="storag"):
        make(storag=LazyTensorStorage)
    with pytest.raises(RuntimeError, match="a function that builds its own"):
        make(storage=LazyTensorStorage(3))
    with pytest.raises(ValueError, match="positive"):
        make(timeout_s=0)
    buffer = make(storage=functools.partial(LazyTensorStorage, 10))
    buffer.extend(rows(0, 3))
    with pytest.raises(DataError, match="unknown key 'more'") as caught:
        buffer.extend(rows(0, 3).set("more", torch.zeros(3)))
    assert "_fix_schema" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(buffer))
    with pytest.raises(AttributeError, match="update_tensordict_priority"):
        buffer.update_tensordict_priority(rows(0, 1))
    assert len(buffer) == 3


def test_an_answer_that_does_not_come_in_time_names_the_actor(make):
    buffer = make()
    buffer.timeout_s = 0.2
    with pytest.raises(DeadlineError, match=r"Ray actor \w+ \(process \d+ on .*timeout_s=0\.2"):
        buffer.apply(lambda _: threading.Event().wait(3.0))
    with pytest.raises(DeadlineError, match=r"not placed yet.*remote_config"):
        make(remote_config={"num_cpus": 64}, timeout_s=1.0)


def test_close_ends_the_actor_and_its_death_is_said(make):
    buffer = make()
    process = buffer.apply(lambda _: os.getpid())
    buffer.close()
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        len(buffer)
    deadline = time.monotonic() + DEADLINE_S
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{process}")
    buffer = make()
    os.kill(buffer.apply(lambda _: os.getpid()), signal.SIGKILL)
    with pytest.raises(WorkerError, match="has ended"):
        len(buffer)
