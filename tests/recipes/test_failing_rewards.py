"""Rewards that fail: a conversation without one is left out and counted, and only too many of them end a run."""

import gc
import statistics

import pytest

from tests.support.processes import is_running

SOURCE = """
import math, pathlib, time
calls = []

def some_none(completion, answer):
    return None if int(answer) % 3 == 0 else len(completion)

def some_nan(completion, answer):
    return math.nan if int(answer) % 3 == 0 else len(completion)

def some_huge(completion, answer):
    return 1e308 if int(answer) % 3 == 0 else len(completion)

def some_raise(completion, answer):
    return 1 / (int(answer) % 3) + len(completion)

def none_then_raise(completion, answer):
    calls.append(answer)
    if int(answer) % 3:
        return len(completion)
    return None if len(calls) <= 16 else 1 / 0

def one_of_each_group(completion, answer):
    calls.append(answer)
    return None if calls.count(answer) % 4 == 1 else len(completion)

def one_hangs(completion, answer):
    calls.append(answer)
    flag = pathlib.Path(__file__).with_name("hung")
    if len(calls) == 14 and not flag.exists():
        flag.touch()
        time.sleep(600)
    return len(completion)

def all_raise(answer):
    raise KeyError("grader is down")

def all_but_two(completion, answer):
    calls.append(answer)
    return len(completion) if len(calls) <= 2 else None
"""


@pytest.fixture
def run(place):
    """A GRPO run with one of the rewards above."""
    place.module("failing", SOURCE)

    def start(reward, **changes):
        return place.train("grpo", "f", env={"reward": f"failing:{reward}", **changes.pop("env", {})}, **changes)

    return start


@pytest.mark.parametrize(
    ("reward", "frames"), [("some_none", []), ("some_nan", []), ("some_huge", []), ("some_raise", ["in some_raise"])]
)
def test_a_conversation_without_a_reward_is_left_out_and_counted_and_the_run_goes_on(place, run, reward, frames):
    out = run(reward, words=frames).out
    assert out.count("rollouts failed") == 4, "once in each step, and at the end"
    assert out.count("ZeroDivisionError") == len(frames), "the first traceback alone"
    for step in place.steps("f"):
        rollouts = place.rollouts("f", step["step"])
        lost = [rollout for rollout in rollouts if rollout.reward is None]
        kept = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        assert step["rollout/failed"] == len(lost) > 0
        assert step["reward/mean"] == pytest.approx(sum(kept) / len(kept))
        deciles = statistics.quantiles(kept, n=10, method="inclusive")
        for percent, decile in ((10, deciles[0]), (50, deciles[4]), (90, deciles[8])):
            assert step[f"reward/p{percent}"] == pytest.approx(decile)
        assert {rollout.advantage for rollout in lost} == {None}, "no reward is not a reward of zero"
        trained = sum(rollout.tokens for rollout in rollouts if rollout.advantage is not None)
        assert step["tokens/trained"] == trained


def test_the_first_traceback_is_shown_though_conversations_without_one_failed_before(run):
    """Regression: the warning of a step without a traceback counted as its report."""
    out = run("none_then_raise", words=["in none_then_raise", "ZeroDivisionError"]).out
    assert out.count("rollouts failed") == 4


def test_an_infinite_reward_of_an_environment_of_ones_own_is_a_failed_one(place):
    """Regression: the metrics of the step were empty."""
    source = """
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction

class Unchecked(RewardFunction):
    def _number(self, value, where):
        return value

def env(**options):
    score = lambda completion, answer: float("inf") if int(answer) % 3 == 0 else len(completion)
    return DatasetChatEnv(**options).append_transform(Unchecked(score, name="unchecked"))
"""
    place.module("endless", source)
    env = {"name": "endless:env", "reward": None}
    place.train("grpo", "e", env=env, steps=1)
    (step,) = place.steps("e")
    kept = [rollout.reward for rollout in place.rollouts("e", 1) if rollout.reward is not None]
    assert step["rollout/failed"] == 16 - len(kept) > 0
    assert step["reward/mean"] == pytest.approx(sum(kept) / len(kept)) == step["reward/unchecked/mean"]


@pytest.mark.parametrize(("changes", "kept"), [({}, 1.0), ({"min_group_size": 4}, 0.0)])
def test_what_is_left_of_a_group_is_kept_if_it_is_large_enough(place, run, changes, kept):
    run("one_of_each_group", steps=1, **changes)
    step = place.steps("f")[0]
    assert (step["rollout/failed"], step["group/kept_frac"]) == (4, kept)
    assert (step["tokens/trained"] > 0) == (kept > 0)
    for rollout in place.rollouts("f", 1):
        assert (rollout.advantage is None) == (rollout.reward is None or not kept)


@pytest.mark.slow
def test_a_reward_that_hangs_costs_its_deadline_and_the_rows_that_were_not_scored(place, run):
    # The deadline is long for a slow machine, too: what the row that hangs needs is 600 s.
    run("one_hangs", env={"reward_deadline_s": 10}, words=["was not done 10.0 s after its batch began"])
    first, second, _ = place.steps("f")
    assert (first["rollout/failed"], second["rollout/failed"]) == (3, 0), "13 of 16 were scored in time"


@pytest.mark.parametrize("env", [{}, {"user": "failing:all_raise", "max_turns": 2}], ids=["reward", "user"])
def test_a_run_whose_rewards_or_users_all_fail_is_aborted_with_the_first_traceback(place, run, env):
    reward = "some_none" if env else "all_raise"
    run(reward, code=4, words=["at most max_failed = 50%", "got 16 of 16 in step 1", "grader is down"], env=env)
    assert place.steps("f") == []


def test_the_process_of_a_reward_ends_with_its_run(place):
    """Regression: it lived on until the run was collected as garbage."""
    place.module("numbered", "import os\ndef score(completion, answer):\n    return os.getpid()\n")
    gc.disable()
    try:
        place.train("grpo", "n", env={"reward": "numbered:score"}, steps=1)
        [process] = {int(rollout.reward) for rollout in place.rollouts("n", 1)}
        assert not is_running(process)
    finally:
        gc.enable()


def test_how_many_may_fail_is_a_setting(place, run):
    run("all_but_two", max_failed=1.0)
    assert [step["rollout/failed"] for step in place.steps("f")] == [14, 16, 16]
    assert [step["tokens/trained"] for step in place.steps("f")] == [pytest.approx(16, abs=16), 0, 0]


def test_a_run_that_lost_its_rewards_goes_on_from_its_last_checkpoint(place):
    source = "calls = []\ndef score(completion, answer):\n    calls.append(1)\n    assert len(calls) <= 32, 'down'\n"
    place.module("breaks", source + "    return len(completion)\n")
    place.train("grpo", "b", code=4, env={"reward": "breaks:score"}, steps=4, checkpoint={"every": 1})
    assert place.checkpoints("b") == ["step1", "step2"]
    place.module("breaks", "def score(completion, answer):\n    return len(completion)\n")
    place.run("resume", "b")
    assert [step["step"] for step in place.steps("b")] == [1, 2, 3, 4]


def test_held_out_problems_are_measured_and_those_that_cannot_be_scored_are_left_out_of_the_mean(place):
    place.module("exam", "def score(completion, answer):\n    return {'103': None, '102': 0.5}.get(answer, 0.25)\n")
    place.rows("test.jsonl", [{"prompt": f"Say {i}", "answer": f"10{i}"} for i in (2, 2, 3)])
    lost = ["prompts test: 1 of 3 failed and are not in the mean"]
    place.train("grpo", "e", env={"reward": "exam:score"}, eval={"dataset": "test.jsonl", "max_tokens": 4}, words=lost)
    assert place.steps("e")[-1]["eval/prompts/mean"] == 0.5
    place.run("eval", "e", words=["1 failed"])
