"""The main jobs, whole: examples teach a tiny model some of it, reward teaches it the rest (sums: see .ci/run)."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def measures(run, env, what="mean"):
    """What the run recorded on problems that it never trained on, in order."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[f"eval/{env}/{what}"] for row in rows if f"eval/{env}/{what}" in row]


def teach_and_improve(folder, recipe, env, *changes):
    """Accuracy before and after examples, and before and after reward; ``changes`` are for the steps by reward."""
    for command, name, own in (("sft", "taught", ()), ("grpo", "improved", (f"model={folder / 'taught'}", *changes))):
        own = ("eval.every=0", *own)  # before the first step and after the last
        arguments = [command, f"{recipe}_{command}", *own, "--runs", str(folder), "--name", name]
        command_line = [sys.executable, "-m", "llmrl.commands.cli", *arguments]
        subprocess.run(command_line, check=True, capture_output=True, timeout=3000)
    taught, improved = measures(folder / "taught", env), measures(folder / "improved", env)
    assert improved[0] == taught[-1], "the same model, the same problems"
    return taught[0], taught[-1], improved[-1]


def test_a_tiny_model_learns_the_names_of_colours_by_examples_and_then_by_reward(tmp_path):
    _, taught, improved = teach_and_improve(tmp_path, "colours", "colours", "steps=70")
    assert 0.8 <= taught <= improved
    assert improved >= 0.95, "every colour is learned"
    rows = map(json.loads, (tmp_path / "improved" / "metrics.jsonl").read_text().splitlines())
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert sum(rewards[:10]) / 10 <= 0.65, "sampled answers are as often wrong as the examples"
    assert sum(rewards[-10:]) / 10 >= 0.8


def test_a_tiny_model_learns_by_reward_to_call_the_calculator(tmp_path):
    before, taught, improved = teach_and_improve(tmp_path, "tools", "big_sums", "steps=15")  # half of the recipe's
    called = measures(tmp_path / "improved", "big_sums", "call_rate")
    assert before == 0
    assert 0.1 <= taught <= 0.7, "examples call it for some problems only"
    assert taught <= called[0] <= 0.8, "what it does not compute it does not know"
    assert improved >= 0.9
    assert called[-1] >= 0.95
    rows = map(json.loads, (tmp_path / "improved" / "metrics.jsonl").read_text().splitlines())
    assert all("tools/call_rate" in row for row in rows if row["step"])
