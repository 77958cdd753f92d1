"""Pairs of answers from a file to the loss: what counts, the reference, and what is refused."""

import math
import re

import pytest

from llmrl.data.llm.rows import to_pair
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences, sums_reward
from llmrl.errors import DataError
from llmrl.run.metrics import read_metrics
from llmrl.testing import tiny_tokenizer
from llmrl.train.data.preferences import tokenize_pairs
from llmrl.train.settings.preferences import DPOConfig

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


def kto_rows(count=6):
    rows = [{"prompt": f"{n} + {n}?", "completion": f"it is {2 * n}", "label": n % 2 == 0} for n in range(count)]
    return [*rows, {"question": "9 + 9?", "answer": "18", "kto_tag": "true"}, PAIR]


def test_kto_reads_answers_with_labels_and_both_answers_of_pairs(place):
    place.rows("answers.jsonl", kto_rows())
    tokenizer, settings = tiny_tokenizer(), {"dpo": {"kind": "kto"}}
    answers = tokenize_pairs(config(place.path / "answers.jsonl", **settings), tokenizer)
    assert answers.desirable == [True, False, True, False, True, False, True, True, False]
    own, others = [], []
    for ids, mask, cut in zip(answers.ids, answers.masks, answers.num_chosen, strict=True):
        start = int(mask.nonzero()[0])
        own.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[:cut][mask[:cut]])))
        others.append((tokenizer.decode(ids[cut : cut + start]), tokenizer.decode(ids[cut:][mask[cut:]])))
    assert own[0][1] == "it is 0<|im_end|>"
    assert [prompt for prompt, _ in own] == [prompt for prompt, _ in others]
    assert sorted(answer for _, answer in own) == sorted(answer for _, answer in others), "each is given once"
    assert not {*own} & {*others}, "to another prompt"
    longest = max(answers.num_chosen)
    cut = tokenize_pairs(config(place.path / "answers.jsonl", max_length=longest, **settings), tokenizer)
    assert max(len(ids) - own for ids, own in zip(cut.ids, cut.num_chosen, strict=True)) == longest
    for rows, words in (
        ([{"prompt": "a", "completion": "b", "label": "maybe"}], "'label' must be true or false: .*:1 has 'maybe'"),
        ([{"prompt": "a", "completion": "b"}], "column 'label' is missing"),
        ([PAIR, PAIR], "two different prompts: got one"),
    ):
        place.rows("bad.jsonl", rows)
        with pytest.raises(DataError, match=words):
            tokenize_pairs(config(place.path / "bad.jsonl", **settings), tokenizer)


def test_a_run_on_single_answers_starts_at_a_half_and_ranks_held_out_ones(place):
    rows = [{"prompt": f"{n}?", "completion": "yes" if n % 2 else "no", "label": n % 2 == 1} for n in range(30)]
    place.rows("answers.jsonl", rows[:20])
    place.rows("held.jsonl", rows[20:])
    settings = {"dpo": {"kind": "kto"}, "data": {"path": "answers.jsonl"}, "eval": {"dataset": "held.jsonl"}}
    words = ["20 answers (10 of them desirable)", "kto, beta 0.1", "1 undesirable", "held.jsonl · 10 answers"]
    place.train("dpo", "a", steps=8, words=words, **settings)
    steps, held_out = place.steps("a"), read_metrics(place.path / "runs/a")
    assert steps[0]["policy/loss"] == pytest.approx(0.5, abs=1e-6)
    assert steps[-1]["preference/margin"] > 0.01
    assert steps[-1]["policy/loss"] < 0.5
    assert all(step["preference/kl"] >= 0 for step in steps)
    assert held_out[-1]["eval/answers/mean"] == 1.0, "answers that it has not seen, like those that it has"
    place.run("eval", "a", words=["10 answers"])


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
