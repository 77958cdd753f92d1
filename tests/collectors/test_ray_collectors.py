"""Collectors in Ray actors, on a real local cluster."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from llmrl.collectors import MultiSyncDataCollector, RayWeightUpdater, SyncDataCollector
from llmrl.collectors.distributed import RayCollector
from llmrl.collectors.llm import LLMCollector, RayLLMCollector
from llmrl.data.replay_buffers import LazyStackStorage, LazyTensorStorage, RayReplayBuffer, ReplayBuffer
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import ConfigError, DeadlineError, UnsupportedError, WeightSyncError, WorkerError
from llmrl.modules.llm import TransformersWrapper
from llmrl.testing import ScriptedPolicy, tiny_model, tiny_tokenizer
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import descendants, is_running, raises_within, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
FREE = {"num_cpus": 0}


@pytest.fixture
def make(cluster):
    made = []

    def build(cls=RayCollector, envs=2, policy=None, **options):
        envs = [CountingEnv] * envs if isinstance(envs, int) else envs
        given = {"frames_per_batch": 12, "total_frames": 24, "remote_configs": FREE, "timeout_s": 60.0, **options}
        made.append(cls(envs, policy or Scale(), **given))
        return made[-1]

    yield build
    for one in made:
        one.shutdown()


@pytest.fixture
def buffer(cluster):
    made = RayReplayBuffer(storage=functools.partial(LazyTensorStorage, 10_000), remote_config=FREE, timeout_s=60)
    yield made
    made.close()


def pids(collector):
    return [int(member.place.split()[1]) for member in collector._pool.workers]


def test_each_actor_gives_its_share_weights_are_applied_between_batches_and_states_go_on(make):
    policy = Scale()
    one = make(policy=policy, sync=True, track_policy_version=True, total_frames=36, update_after_each_batch=True)
    alone = SyncDataCollector(CountingEnv, Scale(), frames_per_batch=6, track_policy_version=True)
    batch = one.next()
    assert batch.batch_size == (12,)
    assert batch.names == ["time"]
    expected = alone.next().exclude("collector")
    for part in (batch[:6], batch[6:]):
        assert (part.exclude("collector") == expected).all()
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 0, 2, 2, 1, 1, 1, 1, 3, 3]
    with torch.no_grad():
        policy.scale.fill_(-1.0)
    batch = one.next()
    assert (batch["action"] == -1).all()
    assert set(batch["policy_version"].tolist()) == {1}
    state = one.state_dict()
    assert (state["frames"], state["iter"], state["version"]) == (24, 2, 1)
    last = one.next()
    with pytest.raises(StopIteration):
        one.next()
    assert one.counters == {"produced": 36, "delivered": 36, "dropped": 0}
    one.load_state_dict(state)
    assert (next(iter(one))["observation"] == last["observation"]).all()  # both begin where trajectories began
    assert one.counters["delivered"] == 36
    assert len(one) == 3
    assert one.set_seed(7) == one.set_seed(7)
    updater = RayWeightUpdater(None, one.remote_collectors)
    updater.register_collector(one)
    version = one.policy_version
    updater.push_weights({"scale": torch.tensor(3.0)})
    assert one.policy_version == version + 1
    one.load_state_dict(state)
    assert (next(iter(one))["action"] == -1).all()
    one.shutdown()
    wait_until(lambda: not any(map(is_running, pids(one))))
    with pytest.raises(WorkerError, match="was shut down"):
        one.update_policy_weights_()


def test_first_come_first_served_each_row_has_the_version_that_made_it_and_a_dead_actor_is_named(make):
    slow = functools.partial(CountingEnv, cost_s=0.02)
    one = make(envs=[CountingEnv, slow], frames_per_batch=8, total_frames=-1, track_policy_version=True)
    assert one.local_policy.scale == 1
    sent, seen = {0: 1.0}, []
    end = time.monotonic() + 60
    while len(set(seen)) < 3:  # a batch may have been collected long before it is taken
        assert time.monotonic() < end, seen
        batch = one.next()
        assert batch.batch_size == (8,)
        version = one.policy_version + 1
        sent[version] = 1.0 / (1 + version)
        one.update_policy_weights_({"scale": torch.tensor(sent[version])})
        for number, action in zip(batch["policy_version"].tolist(), batch["action"].flatten().tolist(), strict=True):
            assert action == pytest.approx(sent[number])
            seen.append(number)
    assert one.policy_version == len(sent) - 1
    with pytest.raises(WeightSyncError, match="no weight is called 'other'"):
        one.update_policy_weights_({"other": torch.zeros(())})

    os.kill(pids(one)[1], signal.SIGKILL)
    with raises_within(50, WorkerError, r"collector 1 of 2 \(Ray actor \w+, process \d+ on .*it has ended"):
        list(one)
    with pytest.raises(WorkerError, match="collector 1 of 2"):
        one.update_policy_weights_()
    wait_until(lambda: not any(map(is_running, pids(one))))


def test_actors_fill_a_buffer_are_paused_take_weights_and_count_every_frame(make, buffer):
    one = make(
        envs=functools.partial(CountingEnv, cost_s=0.001),
        num_collectors=2,
        replay_buffer=buffer,
        total_frames=-1,
        track_policy_version=True,
    )
    one.start()
    for call in (one.start, one.next):
        with pytest.raises(ConfigError, match="already"):
            call()
    wait_until(lambda: len(buffer) >= 24)
    with one.pause():
        count, counts = len(buffer), one.counters
        one.update_policy_weights_({"scale": torch.tensor(-1.0)})
        one._settle()
        assert (len(buffer), one.counters) == (count, counts)
    wait_until(lambda: len(buffer) >= count + 48)
    one.async_shutdown()
    counts = one.counters
    assert counts["produced"] == counts["delivered"] + counts["dropped"]
    assert counts["delivered"] == buffer.write_count
    rows = buffer[:]
    old = rows["policy_version"] == 0
    assert (rows["action"][old] == 1).all()
    assert (rows["action"][~old] == -1).all()
    assert (~old).any()
    ids = rows["collector", "traj_ids"]
    assert all((rows["observation"][ids == number].diff(dim=0) == 1).all() for number in ids.unique())


def test_other_classes_of_collectors_run_in_actors_too_and_leave_no_process(make):
    one = make(
        envs=1,
        collector_class=MultiSyncDataCollector,
        num_workers_per_collector=2,
        collector_kwargs={"cat_results": "stack"},
        track_policy_version=True,
        sync=True,
    )
    started = [pid for number in pids(one) for pid, _ in descendants(number)]
    assert len(started) >= 2
    batch = one.next()
    assert batch.batch_size == (2, 6)
    ids = batch["collector", "traj_ids"]
    assert len(ids.unique()) == 4  # two trajectories of each
    one.update_policy_weights_({"scale": torch.tensor(-1.0)})
    batch = one.next()
    assert (batch["action"] == -1).all()
    assert (batch["policy_version"] == 1).all()
    one.shutdown()
    wait_until(lambda: not any(map(is_running, [*pids(one), *started])), 60)


def test_an_env_that_raises_in_the_background_and_one_whose_step_never_ends(make, buffer):
    one = make(envs=[functools.partial(CountingEnv, 10, fault="raise")], replay_buffer=buffer, total_frames=-1)
    with pytest.warns(UserWarning, match="the env failed at 5"):
        start_and_fail(one)
    with pytest.raises(WorkerError, match=r"(?s)collector 0 of 1.*the env failed at 5.*Traceback"):
        one.async_shutdown()
    one = make(envs=[functools.partial(CountingEnv, 10, fault="hang")], timeout_s=3.0)
    with pytest.raises(DeadlineError, match=r"collector 0 of 1.*nothing for 3 s"):
        one.next()


def start_and_fail(collector):
    collector.start()
    watchers = [thread for thread in threading.enumerate() if thread.name == "llmrl-ray-watch"]
    watchers[-1].join(60)  # the latest; it ends after its warning


def test_what_cannot_be_is_refused(make, cluster):
    def broken():
        raise OSError("no such simulator")

    refused = [
        ({"num_collectors": 3}, ConfigError, r"one number of workers.*'create_env_fn': 2, 'num_collectors': 3"),
        ({"frames_per_batch": [6, 12], "sync": True}, ConfigError, r"one number: got \[6, 12\]"),
        ({"replay_buffer": ReplayBuffer()}, ConfigError, "RayReplayBuffer: got ReplayBuffer"),
        ({"frames_per_bath": 3}, TypeError, "frames_per_batch"),
        ({"track_policy_version": "uuid"}, UnsupportedError, "versions are numbers"),
        ({"policy_factory": Scale}, TypeError, "exclude each other"),
        ({"num_workers_per_collector": 0}, ConfigError, "at least 1: got 0"),
        ({"envs": [broken]}, OSError, "no such simulator"),
        ({"policy": Unpicklable()}, ConfigError, "policy_factory"),
        ({"remote_configs": {"num_cpus": 64}}, ConfigError, r"must have {'CPU': 64} for an actor: got \[{'CPU': 2"),
    ]
    for options, kind, message in refused:
        with pytest.raises(kind, match=message):
            make(**options)


class Unpicklable(nn.Module):
    def __reduce__(self):
        raise RuntimeError("a handle of a device")


# --- conversations

ROWS = [{"query": f"q{n}", "answer": str(n)} for n in range(6)]


def dialogs(rank=0, world_size=1):
    return DatasetChatEnv(
        dataset=ROWS, shuffle=False, num_envs=1, max_steps=1, rank=rank, world_size=world_size, epochs=2
    )


def tiny_policy(seed=0):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=seed)
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "do_sample": False})


def test_conversations_come_from_actors_with_the_weights_that_were_pushed(cluster):
    shares = [functools.partial(dialogs, rank, 2) for rank in range(2)]
    given = {"dialog_turns_per_batch": 2, "yield_only_last_steps": True, "track_policy_version": True}
    collector = RayLLMCollector(shares, policy_factory=tiny_policy, num_cpus=0, **given)
    local = [LLMCollector(make(), policy=tiny_policy(), yield_only_last_steps=True) for make in shares]
    try:
        for version, seed in enumerate((0, 5)):
            if version:
                model = tiny_model(tiny_tokenizer(), seed=seed)
                collector.update_policy_weights_(model)
                for one in local:
                    one.update_policy_weights_(model)
            expected = [one.next() for one in local]
            batch = collector.next()
            assert batch["policy_version"].tolist() == [version] * 2
            assert batch.get("query").tolist() == [name for one in expected for name in one.get("query").tolist()]
            ids = [one.get(("tokens", "full"), as_list=True)[0] for one in expected]
            assert all(map(torch.equal, batch.get(("tokens", "full"), as_list=True), ids))
        with pytest.raises(WeightSyncError, match=r"worker 0.*refused version 2"):
            collector.update_policy_weights_({"lm_head.weight": torch.zeros(1)})
        with collector.pause():
            state = collector.state_dict()
        rest = sum(len(batch) for batch in collector)
        assert rest == 12 - 4
        assert collector.counters == {"produced": 12, "delivered": 12, "dropped": 0}
        collector.load_state_dict(state)
        assert collector.next().get("query").tolist() == ["q4", "q5"]
        os.kill(int(collector._pool.workers[0].place.split()[1]), signal.SIGKILL)
        with pytest.raises(WorkerError, match="collector 0 of 2"):
            list(collector)
    finally:
        collector.shutdown()


def test_an_actor_fills_a_buffer_with_conversations(cluster):
    rows = RayReplayBuffer(storage=functools.partial(LazyStackStorage, 1000), remote_config=FREE, timeout_s=60)
    collector = RayLLMCollector(
        functools.partial(DatasetChatEnv, dataset=ROWS, num_envs=2, max_steps=1),
        policy=ScriptedPolicy(["4"]),
        dialog_turns_per_batch=2,
        total_dialog_turns=24,
        replay_buffer=rows,
        sync_iter=False,
        num_cpus=0,
    )
    try:
        with pytest.raises(TypeError, match="concurrency"):
            RayLLMCollector(dialogs, policy=ScriptedPolicy(["x"]), dialog_turns_per_batch=1, concurency=2)
        collector.start()
        wait_until(lambda: collector.counters["delivered"] == 24)
        collector.async_shutdown()
        assert collector.counters == {"produced": 24, "delivered": 24, "dropped": 0}
        assert len(rows) == 24
        assert {row["query"] for row in rows[:].unbind(0)} == {f"q{n}" for n in range(6)}
    finally:
        collector.shutdown()
        rows.close()
