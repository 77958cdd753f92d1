"""Conversations that proceed each on its own, and conversations that the environment fails for."""

from __future__ import annotations

import threading

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs import StepCounter
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.errors import ConfigError, RolloutError, ShapeError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.testing import ScriptedPolicy, tiny_model, tiny_tokenizer
from tests.support.conversations import ROWS, AskAgain, dialogs, length, talks_for

PATIENCE_S = 60.0  # a test that would wait for ever fails after so long


def name_of(chat):
    return chat[0]["content"]


def collect(env, policy, **options):
    return LLMCollector(env, policy=policy, yield_only_last_steps=True, **options)


# --- each on its own


def test_conversations_on_their_own_give_what_lock_step_gives():
    def run(**options):
        collector = collect(dialogs(num_envs=6), talks_for([2, 1, 3, 1, 4, 2]), **options)
        return collector.next(), collector.counters

    (together, counted), (apart, counted_apart) = run(), run(concurrency=3)
    assert apart["history"].full.to_chats() == together["history"].full.to_chats()
    assert torch.equal(apart["next", "reward"], together["next", "reward"])
    assert apart.get("query").tolist() == together.get("query").tolist()
    assert set(apart.keys(True)) == set(together.keys(True))
    assert counted == counted_apart


@pytest.mark.parametrize("last", [True, False])
def test_sampled_ids_do_not_depend_on_who_runs_beside_whom(last):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6}, prefer_tokens="always"
    )

    def ids(**options):
        env = dialogs(num_envs=4, max_steps=2, seed=5)
        form = {"yield_only_last_steps": True} if last else {"yield_completed_trajectories": True}
        batch = LLMCollector(env, policy=policy, **form, **options).next()
        return [row.tolist() for row in batch.get(("tokens", "full"), as_list=True)]

    assert ids(concurrency=4) == ids()


def test_a_slow_conversation_holds_back_no_other():
    others_ended, ended = threading.Event(), set()

    def hook(chats):
        [chat] = chats
        if name_of(chat) == "q0":
            assert others_ended.wait(PATIENCE_S), "q1 and q2 wait for q0"
        elif chat[-1]["content"] == "stop":
            ended.add(name_of(chat))
            if ended == {"q1", "q2"}:
                others_ended.set()

    batch = collect(dialogs(hook), talks_for([1, 4, 5, 1, 1, 1]), concurrency=3).next()
    assert [len(chat) // 2 for chat in batch["history"].full.to_chats()] == [1, 4, 5]


def test_no_more_conversations_run_than_allowed():
    lock, running, most = threading.Lock(), set(), []

    def hook(chats):
        with lock:
            running.add(name_of(chats[0]))
            most.append(len(running))
            if chats[0][-1]["content"] == "stop":
                running.remove(name_of(chats[0]))

    collect(dialogs(hook, num_envs=6), talks_for([3] * 6), concurrency=2).next()
    assert max(most) <= 2


def test_the_budget_of_turns_is_exact():
    collector = collect(dialogs(num_envs=6), talks_for([3] * 6), concurrency=4, total_dialog_turns=14)
    rows = sum(len(batch) for batch in collector)
    counters = collector.counters
    assert counters["produced"] == 14
    assert counters["delivered"] == 3 * rows
    assert counters["produced"] == counters["delivered"] + counters["dropped"]


def test_an_error_of_the_policy_is_raised_and_the_others_stop():
    def reply(chat):
        if name_of(chat) == "q1":
            raise RuntimeError("the engine is gone")
        return "more"

    collector = collect(dialogs(max_steps=10_000), ScriptedPolicy(reply), concurrency=3, retries=5)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        collector.next()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("conversation")]


def test_threads_have_the_callers_precision_and_no_gradients():
    seen = set()

    def hook(chats):
        seen.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        collect(dialogs(hook), talks_for([1] * 6), concurrency=2).next()
    assert seen == {(False, True, torch.bfloat16)}


def test_concurrency_needs_whole_conversations():
    with pytest.raises(ConfigError, match="concurrency runs whole conversations"):
        LLMCollector(dialogs(), policy=talks_for([1] * 6), concurrency=2)
    with pytest.raises(ConfigError, match="concurrency must be at least 1"):
        collect(dialogs(), talks_for([1] * 6), concurrency=0)


# --- rollouts that fail


def fails(name, times=10_000):
    """An env that fails ``times`` times for the conversation ``name``."""
    left = [times]

    def hook(chats):
        if name in map(name_of, chats) and left[0]:
            left[0] -= 1
            raise OSError(f"the tool of {name} broke")

    return hook


@pytest.mark.parametrize("concurrency", [None, 3])
def test_a_rollout_that_fails_is_tried_again(concurrency):
    # in lock step the first failure is that of the whole batch, after which each row is tried by itself
    collector = collect(dialogs(fails("q1", 2)), talks_for([1, 2, 1] * 2), concurrency=concurrency, retries=2)
    batch = collector.next()
    assert batch["next", "reward"].flatten().tolist() == [4.0, 9.0, 4.0]
    assert collector.counters["failed"] == 0
    assert "the tool of q1 broke" in collector.first_error


@pytest.mark.parametrize("concurrency", [None, 3])
def test_a_rollout_that_keeps_failing_is_a_third_state_and_counted(concurrency):
    collector = collect(dialogs(fails("q1")), talks_for([1, 1, 2] * 2), concurrency=concurrency, retries=1)
    batch = collector.next()
    rewards = batch["next", "reward"].flatten()
    assert rewards.isnan().tolist() == [False, True, False]
    assert rewards[[0, 2]].tolist() == [4.0, 5.0 + 4]
    assert batch["next", "done"].all()
    assert batch["next", "truncated"].flatten().tolist() == [False, True, False]
    assert batch["next", "reward_length"].flatten().isnan().tolist() == [False, True, False]
    assert collector.counters == {"produced": 4, "delivered": 4, "dropped": 0, "conversations": 3, "failed": 1}
    assert batch["history"].full.to_chats()[1][-1]["content"] == "stop"


def test_an_env_that_never_answers_is_no_accident():
    def broken(chats):
        raise OSError("no such server")

    for options in ({}, {"concurrency": 2}):
        with pytest.raises(RolloutError, match=r"failed for all 3(.|\n)*no such server"):
            collect(dialogs(broken), talks_for([1] * 6), retries=1, **options).next()


def test_what_would_fail_for_every_row_is_raised_at_once():
    asked = []

    def wrong(chats):
        asked.append(len(chats))
        raise ShapeError("a reward must be a number per row")

    with pytest.raises(ShapeError, match="a number per row"):
        collect(dialogs(wrong), talks_for([1] * 6), retries=3).next()
    assert asked == [3]


def test_without_retries_an_error_of_the_env_is_raised_as_it_is():
    with pytest.raises(OSError, match="the tool of q2 broke"):
        collect(dialogs(fails("q2")), talks_for([1] * 6)).next()


def test_turns_of_conversations_that_fail_start_anew():
    env = DatasetChatEnv(dataset=ROWS, shuffle=False, num_envs=2, max_steps=None)
    env = env.append_transform(StepCounter(max_steps=3)).append_transform(AskAgain(fails("q1", 3)))
    collector = LLMCollector(env.append_transform(RewardFunction(length, deadline_s=None)), policy=talks_for([3] * 6),
                             dialog_turns_per_batch=2, retries=0)  # fmt: skip
    first, second = collector.next(), collector.next()
    assert first["next", "done"].flatten().tolist() == [False, True]
    assert first["next", "reward"].flatten().isnan().tolist() == [False, True]
    assert [name_of(chat) for chat in second.reshape(-1)["history"].full.to_chats()] == ["q0", "q2"]
