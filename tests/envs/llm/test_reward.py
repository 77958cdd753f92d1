"""A user's function scores turns; a failing one costs rows, never the run."""

import asyncio
import importlib
import math
import sys
import threading

import numpy
import pytest
import torch
from tensordict import TensorDict

from llmrl.concurrency.deadline import ThreadRunner
from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.rewards import CodeReward, JudgeReward
from llmrl.envs.llm.transforms import RewardFunction, load_reward, make_rewards
from llmrl.errors import ConfigError, ShapeError
from tests.support.refusals import refusals


def scores(fn, completions, say, *, columns=None, **options):
    transform = RewardFunction(fn, **options)
    env = ChatEnv(batch_size=[len(completions)]).append_transform(transform)
    td = TensorDict(query=column(["q"] * len(completions)), batch_size=[len(completions)])
    for name, values in (columns or {}).items():
        td.set(name, column(values))
    after = env.step(say(env.reset(td), completions))["next"]
    return after["reward"].flatten().tolist(), transform, after


def test_a_function_sees_completion_answer_and_the_columns_it_names_or_all_of_them(say):
    def graded(completion, answer, level, bonus=0.5):
        return (completion == answer) * level + bonus

    columns = {"answer": ["a", "b"], "level": [2, 3]}
    values, _, after = scores(graded, ["a", "x"], say, columns=columns)
    assert values == after["reward_graded"].flatten().tolist() == [2.5, 0.5]
    assert after["reward"].shape == (2, 1, 1)
    assert scores(graded, ["a"], say, columns={"answer": ["a"], "level": [2], "bonus": [3.0]})[0] == [5.0]
    seen = {}
    scores(lambda completion, answer, **row: seen.update(row, answer=answer) or 1.0, ["a"], say, columns={"level": [2]})
    assert seen == {"query": "q", "level": 2, "answer": None}


def test_tensors_of_the_data_are_columns_too(say):
    """Regression: a tensor column was promised when the reward was attached, and refused at the first step."""

    def near(completion, ids, level, bonus=None):
        return float(ids.sum()) + level + bonus.shape[0]

    rows = [{"query": "q", "ids": torch.arange(3), "level": 10, "bonus": torch.zeros(2)}]
    env = DatasetChatEnv(dataset=rows, num_envs=2).append_transform(RewardFunction(near))
    assert env.step(say(env.reset(), ["a", "b"]))["next", "reward"].flatten().tolist() == [15.0, 15.0]


def test_failures_are_nan_in_their_row_and_counted(say):
    def moody(completion):
        if completion == "raise":
            raise ZeroDivisionError("no good")
        return {"none": None, "nan": math.nan, "exit": 1.0}.get(completion, 1.0)

    values, transform, _ = scores(moody, ["ok", "raise", "none", "nan", "ok"], say)
    assert str(values) == "[1.0, nan, nan, nan, 1.0]"
    assert transform.counters == {"rows": 5, "errors": 1, "timeouts": 0, "none": 2, "retries": 0}
    assert "ZeroDivisionError: no good" in transform.first_error


@pytest.mark.parametrize(
    ("value", "weight"), [(1e308, 1.0), (math.inf, 0.1), (-2e17, 0.1), (1e10, 1e10), (10**400, 0.0)]
)
def test_a_number_too_large_for_the_statistics_of_a_group_is_a_failed_reward(say, value, weight):
    """Regression: 1e308 was written as infinite, and the metrics of its step were empty."""
    values, transform, after = scores(lambda completion: value if completion else 1.0, ["a", ""], say, weight=weight)
    assert math.isnan(after["reward_<lambda>"].flatten()[0])
    assert values[1] == pytest.approx(weight)
    assert (transform.counters["errors"], transform.counters["none"]) == (1, 0)
    assert "row 1 of 2: a reward must lie within 1e+17" in transform.first_error


def test_a_batched_function_that_raises_costs_its_batch_unless_it_may_be_tried_again(say):
    tries = []

    def flaky(completions):
        tries.append(len(completions))
        return [1.0] * len(completions) if len(tries) == 3 else 1 / 0

    values, transform, _ = scores(flaky, ["a", "b"], say, batched=True)
    assert all(map(math.isnan, values))
    assert transform.counters["errors"] == 2
    assert "ZeroDivisionError" in transform.first_error
    values, transform, _ = scores(flaky, ["a", "b"], say, batched=True, retries=1)
    assert (values, tries) == ([1.0, 1.0], [2, 2, 2])
    assert (transform.counters["retries"], transform.first_error) == (1, None)


@pytest.mark.parametrize(
    ("returned", "batched", "message"),
    [
        (torch.ones(2), False, r"one number.*got a Tensor of shape \[2\] for row 1 of 2"),
        ([1.0], False, "got a list for row 1 of 2"),
        ("1.0", False, "got a str for row 1 of 2: '1.0'"),
        ({"score": 1}, False, "got a dict"),
        ([1.0], True, "'<lambda>': .*one value per row, 2: got 1"),
        (torch.ones(3), True, "one value per row, 2: got 3"),
        (1.0, True, "one value per row, 2: got a float"),
        (torch.ones(2, 3), True, r"a Tensor of shape \[3\] for row 1 of 2"),
    ],
)
def test_a_reward_of_the_wrong_shape_is_an_error_that_says_which(returned, batched, message, say):
    with pytest.raises(ShapeError, match=message):
        scores(lambda completion: returned, ["a", "b"], say, batched=batched)


def test_numbers_of_any_library_and_tensors_of_one_element_are_numbers(say):
    values = iter([torch.tensor([[2.0]]), numpy.float32(3), True, 4])
    assert scores(lambda completion: next(values), list("abcd"), say)[0] == [2.0, 3.0, 1.0, 4.0]
    assert scores(lambda completions: torch.tensor([[1.0], [2.0]]), ["a", "b"], say, batched=True)[0] == [1.0, 2.0]


def test_a_failing_row_is_tried_again_before_it_counts_as_failed(say):
    seen = []

    def flaky(completion):
        seen.append(completion)
        if (completion == "twice" and seen.count("twice") < 3) or completion == "always":
            raise ConnectionError("not now")
        return len(seen)

    values, transform, _ = scores(flaky, ["ok", "twice", "always", "ok"], say, retries=2)
    assert str(values) == "[1.0, 4.0, nan, 8.0]"
    assert transform.counters == {"rows": 4, "errors": 1, "timeouts": 0, "none": 0, "retries": 4}
    assert transform.first_error.count("ConnectionError: not now") == 1


def test_coroutines_run_concurrently_over_the_rows(say):
    together = None

    async def meets_the_others(completion, answer):
        nonlocal together
        together = together or asyncio.Barrier(4)  # passes only if all four are there at once
        await together.wait()
        return len(completion) + int(answer)

    columns = {"answer": ["1", "2", "3", "4"]}
    values, transform, _ = scores(meets_the_others, ["a", "bb", "a", "a"], say, columns=columns, deadline_s=20)
    assert values == [2.0, 4.0, 4.0, 5.0]
    transform.close()


def test_no_more_coroutines_run_at_a_time_than_asked_for(say):
    running, most = 0, 0

    async def busy(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    assert scores(busy, ["a"] * 16, say, concurrency=3)[0] == [1.0] * 16
    assert most == 3


@pytest.mark.parametrize("kind", ["coroutines", "threads"])
def test_one_row_of_several_that_is_late_is_the_only_one_that_fails(kind, say):
    release, cancelled = threading.Event(), threading.Event()

    async def waits(completion):
        try:
            await asyncio.sleep(60 if completion == "hang" else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    def blocks(completion):
        return float(completion != "hang" or release.wait(20))

    fn, concurrency = (waits, None) if kind == "coroutines" else (blocks, 2)
    values, transform, _ = scores(fn, ["ok", "hang", "ok", "ok"], say, concurrency=concurrency, deadline_s=1.0)
    assert cancelled.is_set() == (kind == "coroutines")
    assert [math.isnan(value) for value in values] == [False, True, False, False]
    assert transform.counters == {"rows": 4, "errors": 0, "timeouts": 1, "none": 0, "retries": 0}
    assert "row 2 of 4 was not done 1.0 s" in transform.first_error
    assert transform._score(["ok", "ok"], {}) == [1.0, 1.0]
    release.set()


def test_a_coroutine_that_blocks_its_loop_costs_the_batch_and_the_next_one_is_scored(say, monkeypatch):
    monkeypatch.setattr("llmrl.concurrency.deadline.GRACE_S", 0.1)
    monkeypatch.setattr("llmrl.concurrency.background_loop.ANSWER_S", 0.1)
    release = threading.Event()

    async def blocks(completion):
        if completion == "block":
            release.wait(20)
        return 1.0

    values, transform, _ = scores(blocks, ["block", "ok"], say, deadline_s=0.2)
    assert all(map(math.isnan, values))
    assert transform._score(["ok"], {}) == [1.0]
    release.set()


def test_a_function_that_returns_a_coroutine_unseen_is_told_so(say):
    async def score(completion):
        return 1.0

    with pytest.raises(ShapeError, match="got a coroutine for row 1 of 1"):
        scores(lambda completion: score(completion), ["a"], say)


def test_a_failed_reward_of_weight_0_is_reported_and_costs_nothing(say):
    env = ChatEnv(batch_size=[1]).append_transform(RewardFunction(lambda completion: 2.0, name="two"))
    env = env.append_transform(RewardFunction(lambda completion: None, name="watched", weight=0.0))
    td = env.step(say(env.reset(TensorDict(query="q", batch_size=[1])), ["a"]))
    assert td["next", "reward"].item() == 2.0
    assert math.isnan(td["next", "reward_watched"].item())


def test_a_hanging_function_costs_its_rows_not_the_run(say):
    release = threading.Event()

    def hangs(completion):
        if completion == "hang":
            assert not release.wait(60), "the batch waited for it"
        return 1.0

    values, transform, _ = scores(hangs, ["ok", "hang", "ok"], say, deadline_s=1.0)
    release.set()
    assert str(values) == "[1.0, nan, nan]"
    assert transform.counters == {"rows": 3, "errors": 0, "timeouts": 2, "none": 0, "retries": 0}
    assert "row 2 of 3 was not done 1.0 s" in transform.first_error
    env = transform.container  # and the next batch is scored, in a new thread
    td = TensorDict(query="q", batch_size=[3])
    assert env.step(say(env.reset(td), ["a", "b", "c"]))["next", "reward"].flatten().tolist() == [1.0] * 3
    env.close()


def test_a_clone_counts_for_itself_and_leaves_the_function_open():
    class Held:
        closed = 0

        def __call__(self, completion):
            return 1 / len(completion)

        def close(self):
            self.closed += 1

    original = RewardFunction(Held())
    clone = original.clone()
    assert math.isnan(clone._score([""], {})[0])
    assert (original.counters["rows"], original.first_error) == (0, None)
    assert clone.counters["errors"] == 1
    clone.close()
    assert (original._score(["a"], {}), original.fn.closed) == ([1.0], 0)
    original.close()
    assert original.fn.closed == 1


def test_no_deadline_runs_in_the_calling_thread(say):
    names = []
    scores(lambda completion: names.append(threading.current_thread()) or 1.0, ["a"], say, deadline_s=None)
    assert names == [threading.current_thread()]


@pytest.fixture
def module(monkeypatch, tmp_path):
    source = "def exact(completion, answer):\n    return completion == answer\nnumber = 3\n"
    (tmp_path / "my_pkg.py").write_text(f"{source}def size(completion):\n    return len(completion)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("my_pkg")
    del sys.modules["my_pkg"]


def test_weighted_rewards_add_up_and_each_has_a_metric(module, say):
    specs = [{"fn": "my_pkg:exact", "weight": 2.0}, {"fn": "my_pkg:size", "weight": 0.1, "name": "long"}]
    env = ChatEnv(batch_size=[2])
    rewards = make_rewards(specs)
    for reward in rewards:
        env = env.append_transform(reward)
    td = TensorDict(query=column(["q", "q"]), answer=column(["ab", "b"]), batch_size=[2])
    after = env.step(say(env.reset(td), ["ab", "abcd"]))["next"]
    assert after["reward"].flatten().tolist() == pytest.approx([2.2, 0.4])
    assert after["reward_exact"].flatten().tolist() == [1.0, 0.0]
    assert after["reward_long"].flatten().tolist() == [2.0, 4.0]
    for reward in rewards:
        reward.close()


def test_rewards_are_loaded_by_name_or_given_as_functions(module):
    assert load_reward("my_pkg:exact") is module.exact
    assert [reward.name for reward in make_rewards(["my_pkg:exact", module.size])] == ["exact", "size"]


def test_options_reach_the_reward(module):
    options = {"deadline_s": 5.0, "retries": 2, "concurrency": 4, "answer_key": "target", "batched": True}
    options["process"] = False
    (reward,) = make_rewards([{"fn": "my_pkg:size", **options, "name": None}])
    mine = [name for name in options if name not in ("concurrency", "process")]
    assert {name: getattr(reward, name) for name in mine} == {name: options[name] for name in mine}
    assert isinstance(reward._runner, ThreadRunner)
    assert (reward._runner.concurrency, reward.name) == (4, "size")


def test_judge_and_code_are_made_from_their_settings():
    settings = {"url": "http://localhost:1/v1", "model": "m", "concurrency": 3}
    code = {"sandbox": "subprocess", "mode": "all"}
    judge, code = make_rewards([{"judge": settings, "weight": 0.5}, {"code": code}])
    assert (judge.name, judge.weight, judge._runner.concurrency, judge.deadline_s) == ("judge", 0.5, 3, 600.0)
    assert isinstance(judge.fn, JudgeReward)
    assert isinstance(code.fn, CodeReward)
    code.close()


def attached(wants):
    env = DatasetChatEnv(dataset=[{"prompt": "a", "note": "n", "solution_text": "x"}])
    return env.append_transform(RewardFunction(wants))


UNKNOWN_COLUMN = r"'solutoin' must be a column.*Did you mean 'solution_text'"
test_what_cannot_be_run_is_named = refusals(
    (ConfigError, UNKNOWN_COLUMN, lambda: attached(lambda completion, solutoin: 0.0)),
    (ConfigError, "RewardFunction", lambda: RewardFunction(len, retries=-1)),
    (ConfigError, "RewardFunction", lambda: RewardFunction(len, concurrency=0)),
    (ConfigError, "RewardFunction", lambda: RewardFunction(len, deadline_s=0)),
    (ConfigError, "RewardFunction", lambda: RewardFunction(len, weight=math.inf)),
    (ConfigError, "first parameter .*completion", lambda: RewardFunction(lambda: 0.0)),
    (ConfigError, "first parameter .*completion", lambda: RewardFunction(lambda *, completion: 0.0)),
    (ConfigError, "'package.module:name'", lambda: load_reward("my_pkg.exact")),
    (ConfigError, "no module 'no_such_module_here'", lambda: load_reward("no_such_module_here:exact")),
    (ConfigError, "Did you mean 'exact'", lambda: load_reward("my_pkg:exakt")),
    (ConfigError, "must be a function: .*int", lambda: load_reward("my_pkg:number")),
    (ConfigError, "list with at least one reward", lambda: make_rewards([])),
    (ConfigError, "must be a list", lambda: make_rewards("my_pkg:exact")),
    (ConfigError, r"\[0\]: 'wieght'.*Did you mean 'weight'", lambda: make_rewards([{"fn": "x:y", "wieght": 1}])),
    (ConfigError, r"\[0\]: .*one of fn, judge, reward_model, code: got none", lambda: make_rewards([{"weight": 1}])),
    (ConfigError, "got fn and judge", lambda: make_rewards([{"fn": "my_pkg:exact", "judge": {}}])),
    (ConfigError, "2 are called 'exact'; set name", lambda: make_rewards(["my_pkg:exact", "my_pkg:exact"])),
    (ConfigError, r"\[0\]\.judge: .*'modle'", lambda: make_rewards([{"judge": {"url": "http://x", "modle": "m"}}])),
    (ConfigError, "url must begin with http", lambda: make_rewards([{"judge": {"url": "x", "model": "m"}}])),
)
pytest.mark.usefixtures("module")(test_what_cannot_be_run_is_named)


def test_none_of_one_of_several_rewards_leaves_the_others_and_a_failure_does_not(say):
    """Rows: both apply, one applies, none applies, one fails; in both orders."""

    def maths(completion):
        return 1.0 if completion in ("both", "maths") else None

    def code(completion):
        return 1 / 0 if completion == "fails" else 0.5 if completion == "both" else None

    for order in ([maths, code], [code, maths]):
        env = ChatEnv(batch_size=[4])
        for reward in (rewards := make_rewards(order)):
            env = env.append_transform(reward)
        td = TensorDict(query="q", batch_size=[4])
        values = env.step(say(env.reset(td), ["both", "maths", "none", "fails"]))["next", "reward"].flatten().tolist()
        assert values[:2] == [1.5, 1.0]
        assert all(map(math.isnan, values[2:]))
        assert {r.name: r.none_message for r in rewards}["maths"] == "reward 'maths' returned None for 2 of 4 rows."


@pytest.mark.parametrize("as_messages", [True, False])
def test_a_reward_with_the_signature_of_trl_is_called_as_trl_calls_it(as_messages, say):
    seen = {}

    def judged(prompts, completions, level, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, level=level)
        return [float(n) for n in level]

    query = [{"role": "user", "content": "q"}] if as_messages else "q"
    rows = [{"query": query, "answer": "4", "level": n} for n in (1, 2)]
    env = DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, system_prompt="s")
    env.append_transform(RewardFunction(judged))
    assert env.step(say(env.reset(), ["a", "b"]))["next", "reward"].flatten().tolist() == [1.0, 2.0]
    said = [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen["completions"] == (said if as_messages else ["a", "b"])
    assert (seen["prompts"], seen["level"], seen["answer"]) == ([query] * 2, [1, 2], ["4", "4"])
