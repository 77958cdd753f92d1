"""The main jobs, whole: examples teach a tiny model some of it, reward teaches it the rest."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def measures(run, env, what="mean"):
    """What the run recorded on problems that it never trained on, in order."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[f"eval/{env}/{what}"] for row in rows if f"eval/{env}/{what}" in row]


def llmrl(*arguments):
    subprocess.run([sys.executable, "-m", "llmrl.run.cli", *arguments], check=True, capture_output=True, timeout=3000)


def test_a_tiny_model_learns_sums_by_examples_and_then_by_reward(tmp_path):
    options = ["--runs", str(tmp_path), "--name"]
    llmrl("sft", "sums_sft", *options, "taught")
    before, after = measures(tmp_path / "taught", "sums")[0], measures(tmp_path / "taught", "sums")[-1]
    assert before < 0.05
    assert 0.2 <= after <= 0.7, "examples stop early, so that there is something left to improve"
    checkpoint = next((tmp_path / "taught" / "checkpoints").iterdir())
    llmrl("grpo", "sums_grpo", f"model={checkpoint}", "steps=40", "eval.every=40", *options, "improved")
    improved = measures(tmp_path / "improved", "sums")
    assert improved[0] == after, "the same model, the same problems"
    assert improved[-1] >= 0.9


def test_a_tiny_model_learns_by_reward_to_call_the_calculator(tmp_path):
    options = ["--runs", str(tmp_path), "--name"]
    llmrl("sft", "tools_sft", *options, "taught")
    after = measures(tmp_path / "taught", "big_sums")[-1]
    assert measures(tmp_path / "taught", "big_sums")[0] == 0
    assert 0.1 <= after <= 0.7, "examples call it for some problems only"
    checkpoint = next((tmp_path / "taught" / "checkpoints").iterdir())
    llmrl("grpo", "tools_grpo", f"model={checkpoint}", *options, "improved")
    improved, called = (measures(tmp_path / "improved", "big_sums", what) for what in ("mean", "call_rate"))
    assert improved[0] == after, "the same model, the same problems, the same tool"
    assert improved[0] <= called[0] <= 0.8, "what it does not compute it does not know"
    assert improved[-1] >= 0.9
    assert called[-1] >= 0.95
    rows = map(json.loads, (tmp_path / "improved" / "metrics.jsonl").read_text().splitlines())
    assert all("tools/call_rate" in row for row in rows if row["step"])
