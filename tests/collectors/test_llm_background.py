"""`LLMCollector` in the background, and conversations that go on between batches."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.weight_updaters import VanillaWeightUpdater
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.errors import ConfigError, DeadlineError, WorkerError
from llmrl.modules.llm import TransformersWrapper
from llmrl.testing import ScriptedPolicy, tiny_model, tiny_tokenizer
from tests.support.conversations import dialogs, talks_for
from tests.support.processes import wait_until

PATIENCE_S = 120.0
FORMS = [{}, {"yield_completed_trajectories": True}, {"yield_only_last_steps": True, "async_envs": True}]


def buffer():
    return ReplayBuffer(storage=LazyStackStorage(10_000))


def start_and_wait(collector):
    collector.start()
    wait_until(lambda: not collector.background.is_running, PATIENCE_S)


def balanced(counters):
    return counters["produced"] == counters["delivered"] + counters["dropped"]


@pytest.mark.parametrize("form", FORMS)
def test_a_thread_fills_the_buffer_is_paused_and_counts_every_turn(form):
    rows, tokenizer = buffer(), tiny_tokenizer()
    policy = TransformersWrapper(tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2})
    collector = LLMCollector(dialogs(), policy=policy, replay_buffer=rows, track_policy_version=True, **form)
    collector.start()
    for call in (collector.next, collector.rollout, collector.start):
        with pytest.raises(ConfigError, match="already"):
            call()
    wait_until(lambda: len(rows) >= 6, PATIENCE_S)
    with collector.pause():
        written = rows.write_count
        time.sleep(0.05)
        assert rows.write_count == written
        collector.update_policy_weights_(tiny_model(tokenizer, seed=5))
        assert collector.policy_version == 1
    wait_until(lambda: 1 in rows[:]["policy_version"], PATIENCE_S)  # conversations that had ended may come first
    collector.async_shutdown()
    assert balanced(collector.counters)
    assert form.get("yield_only_last_steps") or rows.write_count == collector.counters["delivered"]
    assert set(rows[:]["policy_version"].flatten().tolist()) == {0, 1}
    wait_until(lambda: not any(t.name.startswith(("llmrl-coll", "conversation")) for t in threading.enumerate()))


@pytest.mark.parametrize("form", FORMS)
def test_a_failure_of_the_thread_is_raised_by_the_next_call(form):
    def fails_in_the_third_turn(chats):
        if any(len(chat) >= 6 for chat in chats):
            raise RuntimeError("the tool is broken")

    rows = buffer()
    env = dialogs(fails_in_the_third_turn)
    collector = LLMCollector(env, policy=talks_for([1, 9, 9, 9, 9, 9]), replay_buffer=rows, **form)
    with pytest.warns(UserWarning, match="the tool is broken"):
        start_and_wait(collector)
    for call in (collector.update_policy_weights_, collector.next, collector.async_shutdown):
        with pytest.raises(WorkerError, match="the tool is broken"):
            call()
    assert balanced(collector.counters)
    assert collector.counters["dropped"] > 0
    assert env.is_closed


def test_a_buffer_that_refuses_rows_leaves_them_counted_as_dropped():
    class Full:
        def extend(self, data):
            raise OSError("no space left")

    collector = LLMCollector(dialogs(), policy=ScriptedPolicy(["stop"]), replay_buffer=Full())
    with pytest.raises(OSError, match="no space"):
        collector.next()
    assert collector.counters["dropped"] == collector.counters["produced"] == 3


def test_what_runs_in_the_background_ends_with_its_budget_or_its_data():
    policy, rows = talks_for([2, 1, 3, 1, 2, 2]), buffer()
    for form in FORMS:
        collector = LLMCollector(dialogs(), policy=policy, replay_buffer=buffer(), total_dialog_turns=9, **form)
        start_and_wait(collector)
        collector.async_shutdown()
        assert collector.counters["produced"] == 9
        assert balanced(collector.counters)
    ends = LLMCollector(dialogs(epochs=1), policy=policy, replay_buffer=rows, async_envs=True, **FORMS[1])
    start_and_wait(ends)
    assert (ends.counters["conversations"], ends.counters["delivered"], len(rows)) == (6, 11, 11)
    ends.async_shutdown()
    with pytest.raises(StopIteration):
        ends.rollout()


def test_a_slow_conversation_goes_on_while_others_end_and_begin():
    release = threading.Event()

    def wait_in_q0(chats):
        if chats[0][0]["content"] == "q0":
            assert release.wait(PATIENCE_S)

    env = dialogs(wait_in_q0, epochs=1)
    collector = LLMCollector(env, policy=talks_for([1] * 6), dialog_turns_per_batch=1, **FORMS[2])
    first = [name for _ in range(5) for name in collector.next().get("query").tolist()]
    assert sorted(first) == ["q1", "q2", "q3", "q4", "q5"]
    release.set()
    rest = [name for batch in collector for name in batch.get("query").tolist()]
    assert sorted(first + rest) == [f"q{n}" for n in range(6)]
    assert collector.counters == {"produced": 6, "delivered": 6, "dropped": 0, "conversations": 6, "failed": 0}


def test_no_more_than_a_batch_waits_for_a_caller_that_is_busy():
    collector = LLMCollector(dialogs(), policy=talks_for([1] * 6), dialog_turns_per_batch=4, **FORMS[2])
    assert len(collector.next()) == 4
    time.sleep(0.1)
    assert collector.counters["produced"] <= 4 + 4 + 3
    with collector.pause():
        before = collector.state_dict()
    collector.load_state_dict(before)
    assert len(collector.next()) >= 4
    collector.shutdown()
    assert balanced(collector.counters)


def test_a_turn_that_does_not_end_is_a_deadline_of_the_shutdown():
    waiting, release = threading.Event(), threading.Event()

    def wait_for_release(chats):
        waiting.set()
        release.wait(PATIENCE_S)

    collector = LLMCollector(dialogs(wait_for_release), policy=talks_for([9] * 6), replay_buffer=buffer())
    collector.start()
    assert waiting.wait(PATIENCE_S)
    with pytest.raises(DeadlineError, match=r"must end within 0\.1 s"):
        collector.async_shutdown(timeout=0.1)
    release.set()


def test_arguments_that_cannot_be():
    with pytest.raises(ConfigError, match="async_envs runs whole conversations"):
        LLMCollector(dialogs(), policy=ScriptedPolicy(["x"]), async_envs=True)
    with pytest.raises(ConfigError, match="give one"):
        LLMCollector(dialogs(), policy=ScriptedPolicy(["x"])).start()


def test_weights_of_a_policy_without_an_engine_change_between_two_turns():
    module = torch.nn.Linear(1, 1, bias=False)
    torn = []

    def reply(chat):
        before = module.weight.item()
        time.sleep(0.002)
        torn.append(module.weight.item() != before)
        return "stop"

    rows, updater = buffer(), VanillaWeightUpdater(policy_weights=module)
    options = {"replay_buffer": rows, "weight_updater": updater, "track_policy_version": True, **FORMS[2]}
    collector = LLMCollector(dialogs(), policy=ScriptedPolicy(reply), **options)
    collector.start()
    for value in range(1, 6):
        count = rows.write_count
        collector.update_policy_weights_({"weight": torch.full((1, 1), float(value))})
        wait_until(lambda seen=count: rows.write_count > seen, PATIENCE_S)
    collector.async_shutdown()
    assert collector.policy_version == 5
    assert torn
    assert not any(torn)
