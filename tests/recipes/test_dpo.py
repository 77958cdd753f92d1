"""Pairs of answers from a file to the loss: what counts, the reference, and what is refused."""

import math
import re

import pytest

from llmrl.data.llm.rows import to_pair
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences, sums_reward
from llmrl.errors import DataError
from llmrl.testing import tiny_tokenizer
from llmrl.train.preference_data import tokenize_pairs
from llmrl.train.preference_settings import DPOConfig

PAIR = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five or more"}
ASK = {"role": "user", "content": "2 + 2?"}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"question": "2 + 2?", "chosen": "four", "rejected": "five or more"},
        {"prompt": [ASK], "chosen": [says("four")], "rejected": [says("five or more")]},
        {"chosen": [ASK, says("four")], "rejected": [ASK, says("five or more")]},
        {"prompt": "2 + 2?", "chosen": [ASK, says("four")], "rejected": [ASK, says("five or more")], "score": 3},
    ],
)
def test_the_public_formats_of_pairs(row):
    assert to_pair(row) == ([ASK, says("four")], [ASK, says("five or more")])
    system = {"role": "system", "content": "Be brief."}
    assert to_pair(row, system_prompt="Be brief.")[1] == [system, ASK, says("five or more")]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected'.*row 7"),
        ({"chosen": "b", "rejected": "c"}, "prompt column"),
        ({**PAIR, "rejected": "four"}, "must differ: in row 7"),
        ({**PAIR, "rejected": ""}, "'rejected' must end with an answer"),
        ({**PAIR, "chosen": [ASK]}, "'chosen' must end with an answer"),
        ({"chosen": [ASK, says("b")], "rejected": [says("a"), ASK, says("c")], "prompt": "x"}, "the same up to"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_named(row, words):
    with pytest.raises(DataError, match=words):
        to_pair(row, number=7)


def config(path, **settings):
    return DPOConfig.model_validate({"model": "tiny", "data": {"path": str(path)}, **settings})


def test_the_last_answer_counts_and_its_end_of_turn(place):
    chat = [ASK, says("four"), {"role": "user", "content": "Sure?"}]
    place.rows("pairs.jsonl", [{"chosen": [*chat, says("yes")], "rejected": [*chat, says("no no")]}])
    tokenizer = tiny_tokenizer()
    pairs = tokenize_pairs(config(place.path / "pairs.jsonl"), tokenizer)
    (ids,), (mask,), (cut,) = pairs.ids, pairs.masks, pairs.num_chosen
    counted = [tokenizer.decode(part[marks]) for part, marks in ((ids[:cut], mask[:cut]), (ids[cut:], mask[cut:]))]
    assert counted == ["yes<|im_end|>", "no no<|im_end|>"]
    rendered = tokenizer.apply_chat_template([*chat, says("yes")], return_dict=True)["input_ids"]
    assert ids[:cut].tolist()[: len(rendered)] == rendered[: int(cut)]


def test_pairs_that_are_too_long_are_named_or_counted(place):
    path = place.path / "pairs.jsonl"
    place.rows("pairs.jsonl", [PAIR, {**PAIR, "rejected": "five " * 50}])
    with pytest.raises(DataError, match=r"pairs.jsonl:2: .* one has"):
        tokenize_pairs(config(path, max_length=40), tiny_tokenizer())
    pairs = tokenize_pairs(config(path, max_length=40, too_long="drop"), tiny_tokenizer())
    assert (len(pairs), pairs.num_too_long) == (1, 1)
    with pytest.raises(DataError, match="no pair is left"):
        tokenize_pairs(config(path, max_length=5, too_long="drop"), tiny_tokenizer())


@pytest.mark.parametrize("pairs", [sums_preferences, sums_mistakes])
def test_the_embedded_pairs_are_right_and_wrong_and_the_same_every_time(pairs):
    rows, questions, mistakes = pairs("validation"), set(), set()
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        assert sums_reward(row["chosen"], str(a + b)) == 1.0
        assert sums_reward(row["rejected"], str(a + b)) == 0.0
        questions.add((a, b))
        mistakes.add(row["rejected"])
    assert len(questions) == 500
    assert len(mistakes) > 0.8 * len(rows), "a problem has another mistake almost each time"
    assert rows == pairs("validation")


def test_a_run_starts_at_log_2_and_raises_the_margin(place):
    settings = {"env": {"name": "sums"}, "eval": {"rows": 4, "max_tokens": 4}}
    words = ["dpo · sums", "20 pairs", "sigmoid, beta 0.1", "rejected"]
    place.train("dpo", "a", steps=5, words=words, **settings)
    steps = place.steps("a")
    assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["preference/margin"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["preference/margin"] > 0.01
    assert steps[-1]["policy/loss"] < math.log(2)
    assert "eval/sums/mean" in steps[-1]
    place.run("eval", "a")
    place.run("show", "a", words=["right", "margin", "chosen", "rejected"])


def test_without_a_reference_the_loss_starts_elsewhere(place):
    place.train("dpo", "a", steps=1, dpo={"reference": "none"}, words=["reference: none"])
    assert place.steps("a")[0]["policy/loss"] != pytest.approx(math.log(2), abs=1e-3)


def test_micro_batches_change_nothing(place):
    place.train("dpo", "whole", tokens_per_microbatch=100_000)
    place.train("dpo", "cut", tokens_per_microbatch=100)
    place.same("whole", "cut", tolerance=1e-4, step=3)
