"""`llmrl eval`: several answers to each problem, and several sets of problems."""

import json
import math
from importlib.util import find_spec

import pytest

from llmrl.commands.evaluate import sample_metrics


def test_pass_at_k_is_without_bias_and_failed_answers_are_left_out():
    answers = [([1.0, 0.0, 0.0, 0.0], ["a", "b", "b", "c"]), ([math.nan, 1.0, 1.0, 0.0], ["", "x", "x", "y"])]
    found = sample_metrics(answers)
    assert found["mean"] == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert found["pass@1"] == pytest.approx(found["mean"])
    assert found["pass@2"] == pytest.approx(((1 - 3 / 6) + 1) / 2), "of 4 with 1 right: 1 - C(3, 2) / C(4, 2)"
    assert found["pass@4"] == 1.0
    assert found["majority"] == pytest.approx((0 + 1) / 2)


def test_the_majority_compares_final_answers_not_words():
    texts = ["so <answer>7.0</answer>", "<answer>8</answer>", r"it is \boxed{7}"]
    assert sample_metrics([([1.0, 0.0, 1.0], texts)])["majority"] == 1.0


def test_one_answer_has_a_mean_and_its_interval_alone():
    found = sample_metrics([([score], ["x"]) for score in (1.0, 1.0, 0.0, 1.0)])
    low, high = found.pop("interval")
    assert found == {"mean": 0.75}
    assert (low, high) == pytest.approx((0.3006, 0.9544), abs=1e-4), "Wilson's interval of 3 in 4"


def test_several_sets_with_several_samples(place):
    place.train("grpo", "taught", steps=1)
    for name, count in (("one", 3), ("two", 2)):
        place.rows(f"{name}.jsonl", [{"prompt": f"{name} {number}", "answer": "1"} for number in range(count)])
    asked = ("--data", "one.jsonl", "--data", "two.jsonl")
    result = place.run("eval", "taught", "--samples", "4", "eval.max_tokens=6", *asked, "--json")
    found = [json.loads(line) for line in result.out.splitlines()]
    asked_for = [("one.jsonl", 3, 4), ("two.jsonl", 2, 4)]
    assert [(row["dataset"], row["rows"], row["samples"]) for row in found] == asked_for
    assert {"pass@1", "pass@2", "pass@4", "majority"} <= found[0].keys()
    low, high = found[0]["interval"]
    assert low <= found[0]["mean"] <= high

    greedy = [json.loads(place.run("eval", "taught", "eval.dataset=one.jsonl", "--json").out) for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert "samples" not in greedy[0]
    table = place.run("eval", "taught", "--samples", "2", *asked).out
    assert "avg@2" in table
    assert table.count("majority") == 2
    place.run("eval", "taught", *asked, "--samples", "0", code=2)
    place.run("eval", "taught", "--data", "absent.jsonl", code=3)


LM_EVAL = """
import json, pathlib, sys, urllib.request

words = sys.argv
given = dict(part.split("=", 1) for part in words[words.index("--model_args") + 1].split(","))
body = {"model": given["model"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
asked = urllib.request.Request(given["base_url"], json.dumps(body).encode())
assert json.load(urllib.request.urlopen(asked))["choices"][0]["finish_reason"]
task, folder = words[words.index("--tasks") + 1], pathlib.Path(words[words.index("--output_path") + 1]) / "llmrl"
scores = {"alias": task, "sample_len": 4, "exact_match,none": 0.5, "exact_match_stderr,none": (1 / 12) ** 0.5}
scores |= {"bleu,strict": 3.5, "bleu_stderr,strict": "N/A"}
folder.mkdir()
found = {"results": {task: scores}, "n-samples": {task: {"original": 9, "effective": 4}}}
(folder / "results_2026.json").write_text(json.dumps(found))
"""
INSPECT = """
import json, os, pathlib, sys

words = sys.argv
assert os.environ["OPENAI_BASE_URL"].endswith("/v1") and words[words.index("--model") + 1] == "openai/llmrl"
if words[2] == "broken.py":
    sys.exit("no such task")
metrics = {"accuracy": {"name": "accuracy", "value": 1.0}, "stderr": {"name": "stderr", "value": 0.0}}
scores = [{"name": "includes", "scored_samples": 5, "metrics": metrics}]
results = {"total_samples": 6, "completed_samples": 5, "scores": scores}
log = {"eval": {"task": "sums"}, "status": "error" if words[2] == "ends.py" else "success", "results": results}
folder = pathlib.Path(words[words.index("--log-dir") + 1])
(folder / "log.json").write_text(json.dumps(log | {"error": {"message": "out of cheese"}}))
"""


def test_suites_of_other_programs_ask_the_server_of_the_run(place, monkeypatch):
    place.train("sft", "taught", steps=1)
    wrong = [
        (["lm:x"], ["lm_eval:TASK or inspect:FILE: got 'lm:x'"]),
        (["lm_eval:x", "--samples", "2"], ["--samples too"]),
    ]
    for words, said in wrong:
        place.run("eval", "taught", "--suite", *words, code=2, words=said)
    if find_spec("lm_eval") is None:
        said = ["needs the package 'lm_eval'", "pip install 'lm-eval[api]'"]
        place.run("eval", "taught", "--suite", "lm_eval:x", code=3, words=said)
    place.module("lm_eval", LM_EVAL)
    place.module("inspect_ai", INSPECT)
    suites = ("--suite", "lm_eval:gsm8k --limit 4", "--suite", "inspect:sums.py")
    first, second = (json.loads(line) for line in place.run("eval", "taught", *suites, "--json").out.splitlines())
    assert (first["task"], first["rows"], first["refused"]) == ("gsm8k", 4, 0)
    assert first["metrics"]["bleu/strict"] == {"value": 3.5, "interval": None}
    assert first["metrics"]["exact_match"]["interval"] == pytest.approx([0.1500, 0.8500], abs=1e-4), (
        "Wilson's of 2 in 4"
    )
    assert (second["task"], second["rows"], second["failed"]) == ("sums", 6, 1)
    assert second["metrics"]["includes/accuracy"]["interval"] == pytest.approx([0.5655, 1.0], abs=1e-4), "of 5 in 5"
    place.run(
        "eval", "taught", *suites[2:], words=["sums includes/accuracy 1.000 [0.566, 1.000]", "6 rows", "1 failed"]
    )
    for name, said in (("broken", "it ended with 1"), ("ends", "must end with success: out of cheese")):
        place.run("eval", "taught", "--suite", f"inspect:{name}.py", code=4, words=[said])
    place.module("lm_eval", "import time; time.sleep(600)")
    monkeypatch.setattr("llmrl.commands.suites._SILENT_S", 0.5)
    place.run("eval", "taught", "--suite", "lm_eval:gsm8k", code=4, words=["lm_eval gsm8k must ask the model or end"])
