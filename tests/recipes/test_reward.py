"""A reward model from pairs to the reward of GRPO."""

import math
import re
import shutil

import datasets
import pytest

from llmrl.envs.llm.rewards.model import RewardModelScorer
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences, sums_reward

PAIR = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five or more"}


def test_a_model_of_pairs_is_the_reward_of_grpo(place):
    result = place.train("reward", "judge", steps=8, words=["reward · sums", "20 pairs", "after the last token"])
    steps = place.steps("judge")
    assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=0.05)
    assert steps[-1]["policy/loss"] < steps[0]["policy/loss"] - 0.01
    assert 0 <= steps[-1]["eval/pairs/mean"] <= 1
    assert "pairs test" in result.out
    folder = place.path / "runs/judge/checkpoints/step8"
    scorer = RewardModelScorer.load(str(folder))
    rows = sums_preferences("test")[:6]
    questions = [row["prompt"] for row in rows]
    chosen, rejected = (scorer([row[key] for row in rows], query=questions) for key in ("chosen", "rejected"))
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True)) / 6
    assert right == pytest.approx(steps[-1]["eval/pairs/mean"]), "what was trained is what scores"
    env = {"reward": None, "rewards": [{"reward_model": {"model": str(folder)}, "name": "judge"}]}
    place.train("grpo", "policy", steps=1, env=env)
    assert math.isfinite(place.steps("policy")[-1]["reward/judge/mean"])


def test_every_pair_of_mistakes_has_a_right_and_a_wrong_answer():
    rows = sums_mistakes("validation")
    answers = [str(sum(map(int, re.findall(r"\d+", row["prompt"])))) for row in rows]
    assert {sums_reward(row["chosen"], answer) for row, answer in zip(rows, answers, strict=True)} == {1.0}
    assert {sums_reward(row["rejected"], answer) for row, answer in zip(rows, answers, strict=True)} == {0.0}
    assert len({row["rejected"] for row in rows}) > 0.9 * len(rows), "a problem that comes twice has two mistakes"
    assert rows == sums_mistakes("validation"), "they are the same every time"


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_margin_comes_from_the_data(place, level):
    rows = [{**PAIR, "prompt": f"{i} + {i}?", "gap": 0.5 * i} for i in range(6)]
    data = {"path": place.rows("pairs.jsonl", rows), "margin_column": "gap"}
    place.train("reward", "a", steps=1, data=data, reward={"level": level}, batch_size=6)
    data = {"path": "pairs.jsonl"}
    place.train("reward", "b", steps=1, data=data, reward={"level": level}, batch_size=6)
    with_margin, without = place.steps("a")[0], place.steps("b")[0]
    assert with_margin["preference/margin"] == pytest.approx(without["preference/margin"])
    assert with_margin["policy/loss"] > without["policy/loss"] + 0.3


def test_settings_that_cannot_be_run_are_refused(place):
    place.train("reward", "bad", code=2, words=["env is for models that answer"], env={"name": "sums"})
    place.train("reward", "bad", code=2, words=["lora is for models that answer"], lora={"r": 2})
    place.train("reward", "bad", code=2, words=["first_share is for level token"], reward={"first_share": 0.5})
    place.train("reward", "same", code=3, words=["eval.split must be pairs that are not"], eval={"split": "train"})
    data = {"path": place.rows("p.jsonl", [PAIR, {**PAIR, "prompt": "1 + 1?"}]), "margin_column": "gap"}
    place.train("reward", "bad", code=3, words=["'gap' must be a number: row 1 has None"], data=data)


def test_a_hub_dataset_without_a_test_split_is_held_out_in_part(place, tmp_path, monkeypatch):
    """The hub's library reads from its cache, as it does without a network."""
    file = place.rows("rows.jsonl", [{**PAIR, "prompt": f"{i} + {i}?"} for i in range(40)])
    builder = datasets.load_dataset_builder("json", "default", data_files={"train": file}, cache_dir=tmp_path / "made")
    builder.download_and_prepare()
    folder = tmp_path / "cache/me___pairs/default/0.0.0/0"
    shutil.copytree(builder.cache_dir, folder)
    (folder / "json-train.arrow").rename(folder / "pairs-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder.parents[3]))
    words = ["18 pairs", "the last 2 pairs of split train, not trained on: there is no split test"]
    place.train("reward", "judge", steps=1, words=words, data={"path": "me/pairs"}, eval={})
    assert place.steps("judge")[0]["eval/pairs/mean"] in {0.0, 0.5, 1.0}
    words = ["the hub with the split 'testing'"]
    place.train("reward", "typo", code=3, words=words, data={"path": "me/pairs"}, eval={"split": "testing"})


def test_a_reward_model_is_not_asked_for_answers(place):
    place.train("reward", "judge", steps=1, words=["llmrl show"])
    result = place.run("eval", "judge")
    assert result.code == 2
    assert "measured while it trains" in result.err
