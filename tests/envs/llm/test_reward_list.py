"""A list of weighted rewards becomes transforms that add up, each with a metric of its own."""

from __future__ import annotations

import importlib
import sys

import pytest
from tensordict import TensorDict

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.rewards import CodeReward, JudgeReward
from llmrl.envs.llm.transforms import make_rewards
from llmrl.errors import ConfigError
from llmrl.tools.calls import ThreadRunner


@pytest.fixture
def module(monkeypatch, tmp_path):
    source = "def exact(completion, answer):\n    return completion == answer\n"
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


def test_a_name_or_a_function_alone_is_a_reward(module):
    assert [reward.name for reward in make_rewards(["my_pkg:exact", module.size])] == ["exact", "size"]


def test_options_reach_the_reward(module):
    options = {
        "deadline_s": 5.0,
        "retries": 2,
        "concurrency": 4,
        "answer_key": "target",
        "batched": True,
        "process": False,
    }
    (reward,) = make_rewards([{"fn": "my_pkg:size", **options, "name": None}])
    mine = [name for name in options if name not in ("concurrency", "process")]
    assert {name: getattr(reward, name) for name in mine} == {name: options[name] for name in mine}
    assert isinstance(reward._runner, ThreadRunner)
    assert reward._runner.concurrency == 4
    assert reward.name == "size"


def test_judge_and_code_are_made_from_their_settings():
    judge, code = make_rewards(
        [
            {"judge": {"url": "http://localhost:1/v1", "model": "m", "concurrency": 3}, "weight": 0.5},
            {"code": {"sandbox": "subprocess", "mode": "all"}},
        ]
    )
    assert (judge.name, judge.weight, judge._runner.concurrency, judge.deadline_s) == ("judge", 0.5, 3, 600.0)
    assert isinstance(judge.fn, JudgeReward)
    assert isinstance(code.fn, CodeReward)
    code.close()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "must be a list with at least one reward"),
        ("my_pkg:exact", "must be a list"),
        ([{"fn": "my_pkg:exact", "wieght": 1}], r"rewards\[0\]: 'wieght' is not a setting.*Did you mean 'weight'"),
        ([{"weight": 1}], r"rewards\[0\]: must have exactly one of fn, judge, reward_model, code: got none"),
        ([{"fn": "my_pkg:exact", "judge": {}}], "got fn and judge"),
        ([{"fn": "my_pkg:exakt"}], "Did you mean 'exact'"),
        (["my_pkg:exact", "my_pkg:exact"], "2 are called 'exact'; set name"),
        ([{"judge": {"url": "http://x", "modle": "m"}}], r"rewards\[0\]\.judge: .*'modle'"),
        ([{"judge": {"url": "x", "model": "m"}}], "url must begin with http"),
    ],
)
def test_entries_that_cannot_be_run_are_named(module, specs, message):
    with pytest.raises(ConfigError, match=message):
        make_rewards(specs)
