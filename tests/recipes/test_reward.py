"""A reward model from pairs to the reward of GRPO."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from llmrl.envs.llm.rewards.model import RewardModelScorer
from llmrl.envs.llm.tasks.sums import sums_preferences
from llmrl.errors import DataError
from tests.support.saved_models import save_tiny
from tests.support.training_rows import worst

datasets = pytest.importorskip("datasets")

FILE, HEAD = "adapter_model.safetensors", "base_model.model.score.weight"
ROWS = sums_preferences("test")[:6]
ALL = {"rows": 500}  # the default: a file has no other pairs to measure
PAIR = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five or more"}


def judged_by(model):
    return {"reward": None, "rewards": [{"reward_model": {"model": str(model)}, "name": "judge"}]}


def test_a_model_of_pairs_is_the_reward_of_grpo(place):
    words = ["reward · sums", "20 pairs", "after the last token", "pairs test"]
    place.train("reward", "judge", steps=8, words=words)
    steps = place.steps("judge")
    assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=0.05)
    assert steps[-1]["policy/loss"] < steps[0]["policy/loss"] - 0.01
    assert 0 <= steps[-1]["eval/pairs/mean"] <= 1
    place.run("show", "judge", words=["right", "chosen", "rejected"])
    folder = place.checkpoint("judge", 8)
    scorer = RewardModelScorer.load(str(folder))
    questions = [row["prompt"] for row in ROWS]
    chosen, rejected = (scorer([row[key] for row in ROWS], query=questions) for key in ("chosen", "rejected"))
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True)) / 6
    assert right == pytest.approx(steps[-1]["eval/pairs/mean"]), "what was trained is what scores"
    place.train("grpo", "policy", steps=1, env=judged_by(folder))
    assert math.isfinite(place.steps("policy")[-1]["reward/judge/mean"])


def test_the_plan_reads_the_files_of_a_reward_model_but_no_weights(place):
    place.train("reward", "judge", steps=1)
    folder = place.checkpoint("judge", 1)
    place.plan("grpo", env=judged_by(folder))
    weights = load_file(folder / "model.safetensors")
    shutil.copytree(folder, place.path / "headless")
    save_file({n: v for n, v in weights.items() if n != "score.weight"}, place.path / "headless/model.safetensors")
    words = ("reward_model.model headless: cannot be loaded", "in none of its files, such as score.weight")
    place.plan("grpo", env=judged_by("headless"), code=3, words=words)
    (place.path / "headless/config.json").unlink()
    place.plan("grpo", env=judged_by("headless"), code=3, words=("reward_model.model headless: cannot be loaded",))
    place.plan("grpo", env=judged_by("gone"), code=3, words=("reward_model.model gone: must be the folder",))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_adapters_and_the_output_layer_are_trained_saved_resumed_and_read_as_a_reward(place, tied):
    peft = pytest.importorskip("peft")
    save_tiny("base", tied=tied)
    changes = {"model": "base", "lora": {"r": 2}, "checkpoint": {"every": 2}, "data": {"rows": 16}}
    words = [f"1 056 of {'24 960' if tied else '40 544'} parameters trained"]  # of which 32 are the output's
    place.train("reward", "judge", steps=4, words=words, **changes)
    first, last = (place.checkpoint("judge", step) for step in (2, 4))
    base, (early, late) = place.path / "base", (load_file(f / "adapter" / FILE) for f in (first, last))
    assert (early[HEAD] - late[HEAD]).abs().max() > 1e-3, "the output layer learns"
    assert not list(first.glob("model*"))

    # the whole model is that of peft, from the base and the adapters' file alone
    read = peft.AutoPeftModelForSequenceClassification.from_pretrained(last / "adapter", num_labels=1)
    own = place.weights("judge", 4)
    assert worst(own, read.merge_and_unload().state_dict()) < 1e-6
    assert torch.equal(own["score.weight"], late[HEAD])
    begun = load_file(base / "model.safetensors")["model.norm.weight"]
    assert torch.equal(own["model.norm.weight"], begun), "what has no adapter stays"

    # GRPO reads a run's folder; adapters alone, of a run that was killed or of an export, give the same rewards
    given = [row["chosen"] for row in ROWS], [row["prompt"] for row in ROWS]
    place.cut_back("judge", "again", to=2)
    place.run("export", "judge", "alone", "--dtype", "float32")
    for step, copy in ((2, "again"), (4, "judge")):
        options = ("--merge", "--dtype", "float32", "--checkpoint", f"step{step}")
        place.run("export", copy, f"merged{step}", *options)
    scores = {name: RewardModelScorer.load(str(name))(*given) for name in (last, "alone", "merged4", first, "merged2")}
    whole = scores[last]
    assert scores["alone"] == pytest.approx(whole, abs=1e-5)
    assert scores["merged4"] == pytest.approx(whole, abs=1e-5)
    assert scores["merged2"] == pytest.approx(scores[first], abs=1e-5)
    assert max(abs(one - other) for one, other in zip(scores[first], whole, strict=True)) > 1e-3
    for run in ("judge", "again"):
        place.train("grpo", f"policy-{run}", steps=1, env=judged_by(f"runs/{run}"))
    rewards = [place.steps(f"policy-{run}")[0]["reward/judge/mean"] for run in ("judge", "again")]
    assert rewards[0] != rewards[1]

    # a resumed run is the run that would have been; another one goes on from its adapters
    place.run("resume", "again")
    place.same("judge", "again")
    assert worst(load_file(place.checkpoint("again", 4) / "adapter" / FILE), late) == 0
    shutil.rmtree(place.checkpoint("again", 4))
    place.train("reward", "more", steps=1, model="runs/again", optim={"lr": 1e-9}, eval={"rows": 6})
    merged = AutoModelForSequenceClassification.from_pretrained("merged2").state_dict()
    assert worst(place.weights("more", 1), merged) < 1e-6


def test_a_reward_model_begins_from_adapters_of_a_language_model_and_is_read_from_a_folder_of_peft_alone(place):
    pytest.importorskip("peft")
    save_tiny("base")
    place.train("sft", "taught", model="base", lora={"r": 2}, checkpoint={"every": 2})
    place.cut_back("taught", "cut", to=2)
    place.run("export", "taught", "alone", "--dtype", "float32")
    place.train("reward", "merged", model="runs/cut", steps=1, optim={"lr": 1e-9}, eval={"rows": 6})
    place.train("reward", "judge", model="alone", eval={"rows": 6}, words=["goes on from the adapter"])
    shutil.copytree(place.checkpoint("judge", 3) / "adapter", "bare")  # no config.json, no tokenizer
    given = [row["chosen"] for row in ROWS], [row["prompt"] for row in ROWS]
    whole, bare = (RewardModelScorer.load(str(name))(*given) for name in (place.checkpoint("judge", 3), "bare"))
    assert bare == pytest.approx(whole, abs=1e-6)
    shutil.move("base", "moved")
    with pytest.raises(DataError, match="give it as base"):
        RewardModelScorer.check("bare")
    RewardModelScorer.check("bare", base="moved")
    assert RewardModelScorer.load("bare", base="moved")(*given) == pytest.approx(whole, abs=1e-6)


@pytest.mark.slow
def test_two_processes_that_share_the_model_have_the_adapters_of_one(place):
    pytest.importorskip("peft")
    savings = ("parallel.mode=fsdp2", "memory.checkpointing=on")
    changes = {"lora": {"r": 2}, "tokens_per_microbatch": 200}
    place.train_as_one_and_as_ranks("reward", *savings, step=3, **changes)
    one, two = (load_file(place.checkpoint(run, 3) / "adapter" / FILE) for run in ("one", "two"))
    # Rounding of sums, which AdamW enlarges where gradients are small: on two ranks 1.5e-6 or, on another processor,
    # 5.6e-6, 1.3e-6 in one process with other micro-batches; in float64 1.3e-15 and 2.0e-15.
    assert worst(one, two) < 2e-5
    assert worst(place.weights("one", 3), place.weights("two", 3)) < 2e-5


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_margin_comes_from_the_data(place, level):
    rows = [{**PAIR, "prompt": f"{i} + {i}?", "gap": 0.5 * i} for i in range(6)]
    place.rows("pairs.jsonl", rows)
    for name, column in (("a", "gap"), ("b", None)):
        data = {"path": "pairs.jsonl", "margin_column": column}
        place.train("reward", name, steps=1, data=data, reward={"level": level}, batch_size=6, eval=ALL)
    with_margin, without = place.steps("a")[0], place.steps("b")[0]
    assert with_margin["preference/margin"] == pytest.approx(without["preference/margin"])
    assert with_margin["policy/loss"] > without["policy/loss"] + 0.3


def test_a_hub_dataset_without_a_test_split_is_held_out_in_part(place, tmp_path, monkeypatch):
    """The hub's library reads from its cache, as it does without a network."""
    file = place.rows("rows.jsonl", [{**PAIR, "prompt": f"{i} + {i}?"} for i in range(40)])
    builder = datasets.load_dataset_builder("json", "default", data_files={"train": file}, cache_dir=tmp_path / "made")
    builder.download_and_prepare()
    folder = tmp_path / "cache/me___pairs/default/0.0.0/0"
    shutil.copytree(builder.cache_dir, folder)
    (folder / "json-train.arrow").rename(folder / "pairs-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder.parents[3]))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder.parents[3]))  # for the check before datasets is imported
    words = ["18 pairs", "the last 2 pairs of split train, not trained on: there is no split test"]
    place.train("reward", "judge", steps=1, words=words, data={"path": "me/pairs"}, eval={})
    assert place.steps("judge")[0]["eval/pairs/mean"] in {0.0, 0.5, 1.0}
    words = ["none; eval.dataset=FILE names pairs to evaluate"]  # Regression: it was said that all are too long
    place.train("reward", "few", steps=1, words=words, data={"path": "me/pairs", "rows": 8}, eval={})
    words = ["the hub with the split 'testing'"]
    place.train("reward", "typo", code=3, words=words, data={"path": "me/pairs"}, eval={"split": "testing"})


def test_eval_ranks_held_out_pairs_of_the_run_and_of_a_file(place):
    place.train("reward", "judge", steps=4, words=["llmrl eval"])
    trained = place.steps("judge")[-1]
    rows = [{"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    file = place.rows("other_way.jsonl", rows)
    result = place.run("eval", "judge", "--json", "--data", "sums", "--data", file)
    own, other = map(json.loads, result.out.splitlines())
    assert own["rows"] == other["rows"] == len(ROWS) == trained["eval/pairs/count"]
    assert own["mean"] == pytest.approx(trained["eval/pairs/mean"]) == pytest.approx(1 - other["mean"])
    assert own["interval"][0] <= own["mean"] <= own["interval"][1]
    assert f"pairs test {own['mean']:.3f}" in place.run("eval", "judge").out
    place.run("eval", "judge", "--samples", "2", code=2, words=["--samples"])


@pytest.mark.parametrize("name", ["pairs.jsonl", "PAIRS.JSONL"])
def test_eval_of_a_run_on_a_file_alone_asks_for_pairs(place, name):
    """Regression: with an ending in capitals the pairs that were trained on were measured."""
    file = place.rows(name, [{**PAIR, "prompt": f"{i} + {i}?"} for i in range(4)])
    place.train("reward", "judge", steps=1, words=["llmrl show"], data={"path": file}, eval=ALL)
    place.run("eval", "judge", code=2, words=["--data FILE"])
