"""What only collectors in Ray actors do, on a real local cluster; the rest is in `test_conformance`."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from llmrl.collectors import RayWeightUpdater
from llmrl.collectors.distributed import RayCollector
from llmrl.collectors.llm import LLMCollector, RayLLMCollector
from llmrl.data.replay_buffers import LazyStackStorage, RayReplayBuffer, ReplayBuffer
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import ConfigError, UnsupportedError, WeightSyncError, WorkerError
from llmrl.modules.llm import TransformersWrapper
from llmrl.testing import ScriptedPolicy, tiny_model, tiny_tokenizer
from tests.support.counting_env import Scale
from tests.support.processes import wait_until
from tests.support.worker_collectors import collectors, pids

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
FREE = {"num_cpus": 0}


@pytest.fixture
def make(cluster):
    with collectors(RayCollector, remote_configs=FREE) as make:
        yield make


def test_each_actor_gives_its_share_and_a_state_goes_on_after_the_last_frame(make):
    policy = Scale()
    one = make(policy=policy, sync=True, total_frames=36, update_after_each_batch=True)
    batch = one.next()
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 0, 2, 2, 1, 1, 1, 1, 3, 3]
    with torch.no_grad():
        policy.scale.fill_(-1.0)
    assert (one.next()["action"] == -1).all()
    state = one.state_dict()
    last = one.next()
    with pytest.raises(StopIteration):
        one.next()
    one.load_state_dict(state)
    assert (next(iter(one))["observation"] == last["observation"]).all()  # both begin where trajectories began
    assert one.counters["delivered"] == 36
    updater = RayWeightUpdater(None, one.remote_collectors)
    updater.register_collector(one)
    version = one.policy_version
    updater.push_weights({"scale": torch.tensor(3.0)})
    assert (one.local_policy.scale, one.policy_version) == (-1, version + 1)


def test_what_cannot_be_is_refused(make):
    for options, kind, message in (
        ({"num_collectors": 3}, ConfigError, r"one number of workers.*'create_env_fn': 2, 'num_collectors': 3"),
        ({"frames_per_batch": [6, 12], "sync": True}, ConfigError, r"one number: got \[6, 12\]"),
        ({"replay_buffer": ReplayBuffer()}, ConfigError, "RayReplayBuffer: got ReplayBuffer"),
        ({"track_policy_version": "uuid"}, UnsupportedError, "versions are numbers"),
        ({"num_workers_per_collector": 0}, ConfigError, "at least 1: got 0"),
        ({"remote_configs": {"num_cpus": 64}}, ConfigError, r"must have {'CPU': 64} for an actor: got \[{'CPU': 2"),
    ):
        with pytest.raises(kind, match=message):
            make(**options)


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
        os.kill(pids(collector)[0], signal.SIGKILL)
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
