"""`LLMCollector`: its batches, its end, and that every turn is accounted for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tensordict import TensorDict

from llmrl.collectors.llm import LLMCollector
from llmrl.envs import StepCounter, Transform
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.transforms import DataLoadingPrimer, PolicyVersion
from llmrl.errors import ConfigError, ShapeError, WeightSyncError
from llmrl.modules.llm.policies.base import LLMWrapperBase
from llmrl.testing import FakeEngine, ScriptedPolicy, tiny_tokenizer
from llmrl.train.rollouts.step import oldest_versions
from tests.support.conversations import ROWS, AskAgain, dialogs, talks_for


def dialog_env(num_envs=3, **options):
    return dialogs(num_envs=num_envs, rows=12, **options)


def collector_of(turns, num_envs=3, env=None, **options):
    """A collector of dialogs; conversation n ends in its turn ``turns[n]``, those after the last in its ninth."""
    turns = [*turns, *[9] * (12 - len(turns))]
    return LLMCollector(dialog_env(num_envs, **(env or {})), policy=talks_for(turns), **options)


def conserved(counters):
    return counters["produced"] == counters["delivered"] + counters["dropped"]


# -- the default form: (B, T) turns ------------------------------------------------------------------------------------


def test_turns_come_as_lazy_stacks_and_prompts_grow():
    collector = collector_of([], dialog_turns_per_batch=6, total_dialog_turns=12)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(3, 2), (3, 2)]
    for batch in batches:
        first, second = batch[:, 0], batch[:, 1]
        assert second["history"].prompt.shape[1] == first["history"].prompt.shape[1] + 2
        assert first["next", "history"].prompt.to_chats() == second["history"].prompt.to_chats()
    assert collector.counters == {"produced": 12, "delivered": 12, "dropped": 0, "conversations": 0, "failed": 0}


def test_naming_the_time_dimension_leaves_the_rows_of_a_turn_as_columns(wrapper):
    [turns] = LLMCollector(DatasetChatEnv(dataset=ROWS, num_envs=2), policy=wrapper, total_dialog_turns=2)
    assert turns.names[-1] == "time"
    for name in ("tokens", "masks", "log_probs"):
        assert turns.tensordicts[0].get(name)._tensordict.own_columns() is not None, f"a row of {name} was built"


@pytest.mark.parametrize(
    ("per_batch", "total", "shapes"), [(None, 6, [(3, 1)] * 2), (4, 7, [(3, 2), (3, 1)]), (3, 1, [(3, 1)])]
)
def test_numbers_of_turns_are_rounded_up_to_the_env_and_then_kept(per_batch, total, shapes):
    collector = collector_of([], dialog_turns_per_batch=per_batch, total_dialog_turns=total)
    assert [batch.shape for batch in collector] == shapes


def test_a_finished_conversation_is_replaced_in_its_place():
    collector = collector_of([1, 3, 2], 2, dialog_turns_per_batch=8)
    batch = collector.next()
    assert batch.shape == (2, 4)
    queries = [[row["query"] for row in batch[b].unbind(0)] for b in range(2)]
    assert queries == [["q0", "q2", "q2", "q3"], ["q1", "q1", "q1", "q4"]]
    assert batch["next", "done"].squeeze(-1).tolist() == [[True, False, True, False], [False, False, True, False]]
    assert collector.counters["conversations"] == 3
    batch = collector.next()  # the conversations go on in the next batch
    assert batch[0, 0]["query"] == "q3"
    assert batch[0, 0]["step_count"].item() == 1


def test_reset_at_each_iter_starts_over():
    collector = collector_of([], 2, dialog_turns_per_batch=4, reset_at_each_iter=True, total_dialog_turns=8)
    assert [batch[0, 0]["query"] for batch in collector] == ["q0", "q2"]


def test_flat_turns_of_one_conversation_are_contiguous():
    batch = collector_of([], 2, dialog_turns_per_batch=4, flatten_data=True).next()
    assert batch.batch_size == (4,)
    assert batch.get("query").tolist() == ["q0", "q0", "q1", "q1"]
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 1]


def test_the_data_end_the_iteration_and_no_turn_is_lost():
    collector = collector_of([1] * 12, 2, {"epochs": 1}, dialog_turns_per_batch=8)
    assert [batch.shape for batch in collector] == [(2, 4), (2, 2)]
    assert collector.counters["delivered"] == 12
    with pytest.raises(StopIteration):
        collector.next()


def test_an_end_without_a_whole_batch_of_new_prompts_ends_it_too():
    collector = collector_of([1, 1, 2] + [1] * 9, 2, {"epochs": 1, "repeats": 1}, dialog_turns_per_batch=2)
    assert sum(batch.numel() for batch in collector) == collector.counters["delivered"]


# -- whole conversations -----------------------------------------------------------------------------------------------


def test_one_row_per_conversation_holds_all_of_it_in_the_order_they_were_started():
    collector = collector_of([2, 1, 3] + [1] * 9, yield_only_last_steps=True)
    batch = collector.next()
    assert batch.batch_size == (3,)
    assert batch.get("query").tolist() == ["q0", "q1", "q2"]
    assert [len(chat) for chat in batch["history"].full.to_chats()] == [4, 2, 6]
    assert batch["next", "reward"].flatten().tolist() == [5.0 + 4, 4.0, 5.0 + 6 + 4]  # more!, more!!, stop
    assert batch["next", "done"].all()
    assert "history" not in batch["next"].keys()
    assert collector.counters == {"produced": 6, "delivered": 6, "dropped": 0, "conversations": 3, "failed": 0}


def test_completed_trajectories_are_flat_and_contiguous():
    batch = collector_of([2, 1, 3] + [1] * 9, yield_completed_trajectories=True).next()
    assert batch.batch_size == (6,)
    assert batch.get("query").tolist() == ["q0", "q0", "q1", "q2", "q2", "q2"]
    assert batch["next", "done"].flatten().tolist() == [False, True, True, False, False, True]
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 0, 1, 2]


def test_conversations_are_started_until_there_are_enough_turns():
    collector = collector_of([2, 1] * 6, 2, yield_completed_trajectories=True, dialog_turns_per_batch=5)
    assert [collector.next().batch_size for _ in range(2)] == [(6,), (6,)]


@pytest.mark.parametrize("total", range(1, 14))
@pytest.mark.parametrize("last_only", [False, True])
def test_a_budget_of_turns_is_exact_and_what_it_cuts_is_counted(total, last_only):
    form = {"yield_completed_trajectories": True, "yield_only_last_steps": last_only}
    collector = collector_of([2, 1, 3] * 4, total_dialog_turns=total, **form)
    batches = list(collector)
    assert collector.counters["produced"] == total
    assert conserved(collector.counters)
    if not last_only:
        assert sum(len(batch) for batch in batches) == collector.counters["delivered"]
    assert sum(batch["next", "done"].sum().item() for batch in batches) == collector.counters["conversations"]


def test_an_env_that_need_never_end_is_refused_unless_turns_are_limited():
    env = ChatEnv(batch_size=[2]).append_transform(DataLoadingPrimer(ROWS))
    with pytest.raises(ConfigError, match=r"may never finish one.*StepCounter.*max_dialog_turns"):
        LLMCollector(env, policy=ScriptedPolicy(["a"]), yield_only_last_steps=True)
    collector = LLMCollector(env, policy=ScriptedPolicy(["a"]), yield_only_last_steps=True, max_dialog_turns=2)
    batch = collector.next()
    assert batch["next", "truncated"].all()
    assert not batch["next", "terminated"].any()
    assert collector.counters["produced"] == 4


def test_turn_limits_apply_to_each_conversation_of_the_default_form():
    batch = collector_of([], 2, dialog_turns_per_batch=8, max_dialog_turns=3).next()
    assert batch["next", "truncated"].squeeze(-1).tolist() == [[False, False, True, False]] * 2


def test_a_short_last_batch_of_data_is_collected_whole():
    env = DatasetChatEnv(dataset=ROWS[:5], shuffle=False, num_envs=2, epochs=1)
    collector = LLMCollector(env, policy=ScriptedPolicy(["a"]), yield_only_last_steps=True)
    assert [len(batch) for batch in collector] == [2, 2, 1]


# -- the stream of tokens ----------------------------------------------------------------------------------------------


@pytest.fixture
def wrapper():
    tokenizer = tiny_tokenizer()
    words = iter(["more", "stop", "more", "more", "stop", "stop", "more", "stop"] * 4)
    return LLMWrapperBase(FakeEngine(lambda prompt: next(words), tokenizer=tokenizer), tokenizer=tokenizer)


# -- buffers, versions, state ------------------------------------------------------------------------------------------


class ListBuffer:
    def __init__(self):
        self.rows = []

    def extend(self, data):
        self.rows.extend(data[[i]] for i in range(len(data)))


@pytest.mark.parametrize("options", [{}, {"yield_completed_trajectories": True}, {"yield_only_last_steps": True}])
def test_with_a_buffer_none_is_yielded_and_rows_are_written(options):
    buffer = ListBuffer()
    collector = collector_of([1] * 12, replay_buffer=buffer, total_dialog_turns=9, **options)
    assert list(collector) == [None] * 3
    assert len(buffer.rows) == 9
    assert collector.counters["delivered"] == 9


def test_postproc_sees_the_data_first_and_may_hold_them_back():
    seen = []

    def every_other(data):
        seen.append(data)
        return data if len(seen) % 2 == 0 else None

    collector = collector_of([1] * 12, postproc=every_other, total_dialog_turns=12)
    assert len(list(collector)) == 2
    assert len(seen) == 4


def test_rollout_gives_one_batch_and_leaves_the_buffer_alone():
    buffer = ListBuffer()
    collector = collector_of([1] * 12, replay_buffer=buffer, yield_only_last_steps=True)
    assert len(collector.rollout()) == 3
    assert buffer.rows == []


class Interrupted(FakeEngine):
    """Draws the first token of each answer with the version before, as if new weights had come after it."""

    def generate(self, prompts, params, *, seeds=None):
        self.version += 1
        drawn = super().generate(prompts, params, seeds=seeds)
        versions = [torch.full_like(ids, self.version) for ids in drawn.ids]
        for row in versions:
            row[0] -= 1
        return dataclasses.replace(drawn, version=self.version - 1, versions=versions)


@pytest.mark.parametrize("options", [{}, {"batching": True}])
def test_the_versions_of_all_turns_are_in_the_last_row_beside_their_log_probs(options):
    tokenizer = tiny_tokenizer()
    policy = LLMWrapperBase(Interrupted(["one two three"], tokenizer=tokenizer), tokenizer=tokenizer, **options)
    limits = {"max_dialog_turns": 2, "total_dialog_turns": 2}
    [row] = LLMCollector(dialog_env(1), policy=policy, yield_only_last_steps=True, **limits)
    [mask] = row.get(("masks", "all_assistant_mask"), as_list=True)
    [versions] = row.get(("log_probs", "versions"), as_list=True)
    [ids] = row.get(("tokens", "response"), as_list=True)
    assert versions[mask].tolist() == [0] + [1] * (len(ids) - 1) + [1] + [2] * (len(ids) - 1)
    assert versions[~mask].tolist() == [0] * int((~mask).sum())
    assert row["policy_version"].tolist() == [1]
    assert oldest_versions(row) == [0]
    padded = policy.get_new_version(pad_output=True)(dialog_env(2).reset())
    assert padded.get(("log_probs", "versions")).shape == padded.get(("log_probs", "full")).shape


def test_the_version_moves_with_the_weights_and_is_stamped(wrapper):
    env = DatasetChatEnv(dataset=ROWS, num_envs=2)
    collector = LLMCollector(env, policy=wrapper, yield_only_last_steps=True, track_policy_version=True)
    assert collector.next()["policy_version"].tolist() == [0, 0]
    weights = {"w": torch.ones(2)}
    collector.update_policy_weights_(weights)
    assert wrapper.engine.weights == weights
    assert collector.policy_version == collector.policy_version_tracker.version == wrapper.engine.version == 1
    assert collector.next()["policy_version"].tolist() == [1, 1]
    collector.update_policy_weights_()  # the engine shares the weights: the version alone moves
    assert (collector.policy_version, wrapper.engine.version, wrapper.engine.weights) == (2, 2, None)


def test_weights_that_do_not_arrive_leave_the_version(wrapper, monkeypatch):
    def refuse(weights, *, version):
        raise OSError("out of memory")

    collector = LLMCollector(DatasetChatEnv(dataset=ROWS), policy=wrapper)
    collector.update_policy_weights_({"w": torch.ones(2)})
    monkeypatch.setattr(wrapper.engine, "update_weights", refuse)
    with pytest.raises(WeightSyncError, match="out of memory"):
        collector.update_policy_weights_({"w": torch.ones(2)})
    assert collector.policy_version == wrapper.engine.version == 1


def test_conversations_on_their_way_are_stamped_with_the_version_that_goes_on():
    scripted = talks_for([9] * 12)

    def policy(td):  # one that leaves the stamp to the env
        version = td["policy_version"]
        return scripted(td).set("policy_version", version)

    version = PolicyVersion()
    collector = LLMCollector(dialog_env(2), policy=policy, track_policy_version=version, dialog_turns_per_batch=2)
    assert collector.next()["policy_version"].flatten().tolist() == [0, 0]
    collector.update_policy_weights_()
    assert collector.next()["policy_version"].flatten().tolist() == [1, 1]


@pytest.mark.parametrize("options", [{"yield_only_last_steps": True}, {"yield_completed_trajectories": True}])
def test_a_resumed_collector_goes_on_where_the_saved_one_stood(options):
    def make():
        env = {"repeats": 2, "group_repeats": True, "seed": 3}
        return collector_of([2, 1, 3] * 4, env=env, total_dialog_turns=40, track_policy_version=True, **options)

    def content(batch):
        return [batch.get(name).tolist() for name in ("query", "group_id", "seed", "policy_version")]

    collector = make()
    collector.next()
    collector.update_policy_weights_()
    state = collector.state_dict()
    rest = [content(batch) for batch in collector]
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.policy_version == 1
    assert [content(batch) for batch in resumed] == rest
    assert resumed.counters == collector.counters


@pytest.mark.parametrize("tracked", [False, True])
def test_loading_a_state_tells_engine_and_tracker_their_version(wrapper, tracked):
    env = DatasetChatEnv(dataset=ROWS, max_steps=1)
    collector = LLMCollector(env, policy=wrapper, track_policy_version=tracked, yield_only_last_steps=True)
    state = collector.state_dict() | {"version": 7}
    collector.load_state_dict(state)
    assert wrapper.engine.version == collector.policy_version == 7
    assert collector.next()["policy_version"].tolist() == [7]
    collector.update_policy_weights_()
    assert collector.policy_version == 8


def test_fewer_rows_of_data_than_envs_are_counted_as_they_are_handed_out():
    env = ChatEnv(batch_size=[3]).append_transform(DataLoadingPrimer(ROWS[:2], epochs=1))
    env = env.append_transform(StepCounter(max_steps=9)).append_transform(AskAgain())
    collector = LLMCollector(env, policy=talks_for([8] * 2), dialog_turns_per_batch=6, total_dialog_turns=9)
    assert sum(batch.numel() for batch in collector) == 10  # 2 rows do not divide the budget
    assert collector.counters == {"produced": 10, "delivered": 10, "dropped": 0, "conversations": 0, "failed": 0}


def test_shutdown_closes_the_env_and_ends_the_iteration():
    collector = collector_of([1] * 12)
    collector.next()
    collector.shutdown()
    assert collector.env.is_closed
    assert list(collector) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_factory": lambda: None}, "exactly one of policy"),
        ({"yield_only_last_steps": True, "yield_completed_trajectories": False}, "is a form of"),
        ({"yield_only_last_steps": True, "reset_at_each_iter": True}, "drop reset_at_each_iter"),
        ({"total_dialog_turns": 0}, "total_dialog_turns must be positive"),
        ({"dialog_turns_per_batch": 0}, "dialog_turns_per_batch must be at least 1"),
        ({"replay_buffer": [], "flatten_data": False}, "drop flatten_data"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMCollector(dialog_env(), policy=ScriptedPolicy(["a"]), **options)


class PerToken(Transform):
    """Rewards of as many tokens for each row as the conversation has turns and the row has rows before it."""

    def __init__(self, nested: bool):
        super().__init__()
        self.nested = nested

    def _step(self, td, next_td):
        turns = int(td["step_count"].max()) + 1
        ragged = [torch.zeros(turns + row, 1) for row in range(td.batch_size[0])]
        dense = torch.zeros(td.batch_size[0], turns, 1)
        next_td.set("reward", torch.nested.nested_tensor(ragged, layout=torch.jagged) if self.nested else dense)
        return next_td


@pytest.mark.parametrize("nested", [False, True])
def test_rewards_of_different_shapes_cannot_be_summed_and_those_of_one_turn_need_not_be(nested):
    def batch(max_steps):
        env = DatasetChatEnv(dataset=ROWS, num_envs=2, max_steps=max_steps).append_transform(PerToken(nested))
        return LLMCollector(env, policy=ScriptedPolicy(["a"]), yield_only_last_steps=True).next()

    with pytest.raises(ShapeError, match="must have one shape"):
        batch(max_steps=2)
    assert [len(row) for row in batch(max_steps=1).get(("next", "reward")).unbind()] == ([1, 2] if nested else [1, 1])


def test_a_factory_makes_the_policy():
    env = ChatEnv(batch_size=[1]).append_transform(DataLoadingPrimer(ROWS)).append_transform(StepCounter(max_steps=1))
    collector = LLMCollector(env, policy_factory=lambda: ScriptedPolicy(["hello"]), yield_only_last_steps=True)
    assert collector.next()["history"].response.to_chats() == [[{"role": "assistant", "content": "hello"}]]
    assert isinstance(collector.rollout(), TensorDict)
