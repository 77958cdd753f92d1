"""`llmrl eval`: several answers to each problem, and several sets of problems."""

import json
import math

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
