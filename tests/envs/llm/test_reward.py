"""A user's function scores turns; a failing one costs rows, never the run."""

from __future__ import annotations

import math
import sys
import time
import types

import pytest
from tensordict import TensorDict

from llmrl.data.llm.columns import column
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction, load_reward
from llmrl.errors import ConfigError, MissingKeyError


def scores(fn, completions, say, *, columns=None, **options):
    transform = RewardFunction(fn, **options)
    env = ChatEnv(batch_size=[len(completions)]).append_transform(transform)
    td = TensorDict(query=column(["q"] * len(completions)), batch_size=[len(completions)])
    for name, values in (columns or {}).items():
        td.set(name, column(values))
    after = env.step(say(env.reset(td), completions))["next"]
    return after["reward"].flatten().tolist(), transform, after


def test_a_plain_function_sees_completion_answer_and_the_columns_it_names(say):
    def graded(completion, answer, level, bonus=0.5):
        return (completion == answer) * level + bonus

    columns = {"answer": ["a", "b"], "level": [2, 3]}
    values, _, after = scores(graded, ["a", "x"], say, columns=columns)
    assert values == [2.5, 0.5]
    assert after["reward"].shape == (2, 1, 1)
    assert after["reward_graded"].flatten().tolist() == [2.5, 0.5]


def test_an_optional_column_is_passed_when_it_is_there(say):
    def optional(completion, bonus=0.0):
        return bonus

    assert scores(optional, ["a"], say, columns={"bonus": [3.0]})[0] == [3.0]


def test_keyword_arguments_receive_every_column_and_no_answer_is_none(say):
    seen = {}

    def all_of_it(completion, answer, **columns):
        seen.update(columns, answer=answer)
        return 1.0

    scores(all_of_it, ["a"], say, columns={"level": [2]})
    assert seen == {"query": "q", "level": 2, "answer": None}


def test_a_batched_function_gets_lists(say):
    def shares(completions, answer):
        return [completions.count(c) / len(completions) for c in completions]

    assert scores(shares, ["a", "a", "b", "c"], say, batched=True)[0] == [0.5, 0.5, 0.25, 0.25]


def test_weighted_rewards_add_up(say):
    def one(completion):
        return True

    env = ChatEnv(batch_size=[1]).append_transform(RewardFunction(one, weight=2.0))
    env = env.append_transform(RewardFunction(one, name="again", weight=0.5))
    td = env.step(say(env.reset(TensorDict(query="q", batch_size=[1])), ["a"]))
    assert td["next", "reward"].item() == 2.5
    assert td["next", "reward_again"].item() == 1.0


def test_failures_are_nan_in_their_row_and_counted(say):
    def moody(completion):
        if completion == "raise":
            raise ZeroDivisionError("no good")
        return {"none": None, "nan": math.nan, "exit": 1.0}.get(completion, 1.0)

    values, transform, _ = scores(moody, ["ok", "raise", "none", "nan", "ok"], say)
    assert values[0] == values[4] == 1.0
    assert all(math.isnan(value) for value in values[1:4])
    assert transform.counters == {"rows": 5, "errors": 1, "timeouts": 0, "none": 2}
    assert "ZeroDivisionError: no good" in transform.first_error


def test_a_batched_function_that_raises_or_returns_too_few_costs_its_batch(say):
    values, transform, _ = scores(lambda completions: [1.0], ["a", "b"], say, batched=True)
    assert all(map(math.isnan, values))
    assert transform.counters["errors"] == 2
    assert "one value per row, 2: got 1" in transform.first_error


def test_a_hanging_function_costs_its_rows_not_the_run(say):
    def hangs(completion):
        if completion == "hang":
            time.sleep(60)
        return 1.0

    start = time.perf_counter()
    values, transform, _ = scores(hangs, ["ok", "hang", "ok"], say, deadline_s=0.2)
    assert time.perf_counter() - start < 2.0
    assert values[0] == 1.0
    assert all(map(math.isnan, values[1:]))
    assert transform.counters == {"rows": 3, "errors": 0, "timeouts": 2, "none": 0}
    assert "row 2 of 3 was not done 0.2 s" in transform.first_error
    env = transform.container  # and the next batch is scored, in a new thread
    td = TensorDict(query="q", batch_size=[3])
    assert env.step(say(env.reset(td), ["a", "b", "c"]))["next", "reward"].flatten().tolist() == [1.0] * 3
    env.close()


def test_no_deadline_runs_in_the_calling_thread(say):
    import threading

    names = []
    scores(lambda completion: names.append(threading.current_thread()) or 1.0, ["a"], say, deadline_s=None)
    assert names == [threading.current_thread()]


def test_the_overhead_is_below_a_millisecond_for_64_rows():
    transform = RewardFunction(lambda completion, answer: 1.0)
    completions, columns = ["text"] * 64, {"answer": ["text"] * 64}
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        transform._score(completions, columns)
        best = min(best, time.perf_counter() - start)
    transform.close()
    assert best < 1e-3


def test_a_column_that_the_dataset_lacks_is_named_when_the_reward_is_attached():
    def wants(completion, solutoin):
        return 0.0

    env = DatasetChatEnv(dataset=[{"prompt": "a", "note": "n", "solution_text": "x"}])
    with pytest.raises(ConfigError, match=r"'solutoin' must be a column.*Did you mean 'solution_text'"):
        env.append_transform(RewardFunction(wants))


@pytest.mark.parametrize("fn", [lambda: 0.0, lambda *, completion: 0.0])
def test_a_function_that_cannot_take_a_completion_is_refused(fn):
    with pytest.raises(ConfigError, match="first parameter must take the completion"):
        RewardFunction(fn)


def test_a_policy_without_a_response_is_named():
    env = ChatEnv(batch_size=[1]).append_transform(RewardFunction(lambda completion: 0.0))
    td = env.reset(TensorDict(query="q", batch_size=[1]))
    td["history"].full = td["history"].prompt
    with pytest.raises(MissingKeyError, match="RewardFunction '<lambda>': the policy's response"):
        env.step(td)


def test_rewards_are_loaded_by_name(monkeypatch):
    module = types.ModuleType("my_rewards")
    module.exact = lambda completion: 1.0
    module.size = 3
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert load_reward("my_rewards:exact") is module.exact
    for name, message in (
        ("my_rewards.exact", "must be 'package.module:function'"),
        ("no_such_module_here:exact", "must be importable.*ModuleNotFoundError"),
        ("my_rewards:exakt", "Did you mean 'exact'"),
        ("my_rewards:size", "must be a function: it is a int"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_reward(name)
