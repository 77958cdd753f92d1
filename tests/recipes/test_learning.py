"""The main job, whole: examples teach a tiny model some addition, reward teaches it the rest."""

import json
import subprocess
import sys

import pytest


def accuracies(run):
    """What the run recorded on problems that it never trained on, in order."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["eval/sums/mean"] for row in rows if "eval/sums/mean" in row]


def llmrl(*arguments):
    subprocess.run([sys.executable, "-m", "llmrl.cli", *arguments], check=True, capture_output=True, timeout=3000)


@pytest.mark.slow
def test_a_tiny_model_learns_sums_by_examples_and_then_by_reward(tmp_path):
    options = ["--runs", str(tmp_path), "--name"]
    llmrl("sft", "sums_sft", *options, "taught")
    before, after = accuracies(tmp_path / "taught")[0], accuracies(tmp_path / "taught")[-1]
    assert before < 0.05
    assert 0.2 <= after <= 0.7, "examples stop early, so that there is something left to improve"
    checkpoint = next((tmp_path / "taught" / "checkpoints").iterdir())
    llmrl("grpo", "sums_grpo", f"model={checkpoint}", *options, "improved")
    improved = accuracies(tmp_path / "improved")
    assert improved[0] == after, "the same model, the same problems"
    assert improved[-1] >= 0.9
