"""The loss on held-out rows, against forward passes of Transformers in float64."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.envs.llm.tasks.embedded import EMBEDDED_TASKS
from llmrl.run.metrics import read_metrics
from tests.support.saved_models import save_tiny
from tests.support.training_rows import worst

ANSWERS = ["yes", "no, not at all", "a b c d e f g h i j k", "2"]  # of different lengths: means of rows differ
CHATS = [{"prompt": f"Say {'so ' * i}", "completion": answer} for i, answer in enumerate(ANSWERS)]
PAIRS = [{"prompt": f"{i} + {i}?", "chosen": answer, "rejected": "five " * (i + 1)} for i, answer in enumerate(ANSWERS)]
OPTIM = {"lr": 1e-2, "warmup": 1}


def answer_log_probs(folder, prompt, answer):
    """The log-probs of an answer's tokens and of its end of turn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    start = len(tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"])
    ids = torch.tensor(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
    end = int((ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero()[-1]) + 1
    log_probs = model(ids[None, :end]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:end, None])
    return log_probs[start - 1 :, 0].detach()


def evaluations(place, run):
    """Of step 0, of every step with an evaluation, and of ``llmrl eval``."""
    rows = [row for row in read_metrics(place.path / "runs" / run) if "eval/loss" in row]
    again = json.loads(place.run("eval", run, "--json").out)
    return rows, again


@pytest.mark.parametrize("changes", [{}, {"tokens_per_microbatch": 30, "packing": "off"}, {"packing": "on"}])
def test_the_loss_of_chats_is_the_mean_over_all_their_trained_tokens(place, changes):
    save_tiny("model", tied=False)
    evaluation = {"dataset": place.rows("held.jsonl", CHATS), "every": 2}
    words = ["held.jsonl · 4 conversations", "before and after, every 2 steps", "held-out loss", "perplexity"]
    place.train("sft", "a", model="model", eval=evaluation, words=words, optim=OPTIM, **changes)
    rows, again = evaluations(place, "a")
    assert [row["step"] for row in rows] == [0, 2, 3]
    for row, folder in ((rows[0], "model"), (rows[2], place.checkpoint("a", 3))):
        tokens = torch.cat([answer_log_probs(folder, chat["prompt"], chat["completion"]) for chat in CHATS])
        assert row["eval/loss"] == pytest.approx(-tokens.mean().item(), rel=1e-6)
        assert row["eval/perplexity"] == pytest.approx(math.exp(row["eval/loss"]))
    assert rows[2]["eval/loss"] != pytest.approx(rows[0]["eval/loss"], abs=0.1)
    assert again["loss"] == pytest.approx(rows[2]["eval/loss"], rel=1e-6)
    charts = (place.path / "runs/a/report.html").read_text()
    assert "Held-out loss" in charts
    assert "Held-out perplexity" in charts


@pytest.mark.parametrize("changes", [{}, {"tokens_per_microbatch": 60}, {"lora": {"r": 2, "dropout": 0.5}}])
def test_pairs_are_measured_against_the_starting_model(place, changes):
    if "lora" in changes:
        pytest.importorskip("peft")
    save_tiny("model")
    evaluation = {"dataset": place.rows("held.jsonl", PAIRS), "every": 0}
    torch.manual_seed(0)
    place.train("dpo", "a", model="model", eval=evaluation, optim=OPTIM, words=["held.jsonl · 4 pairs"], **changes)
    rows, again = evaluations(place, "a")
    assert [row["step"] for row in rows] == [0, 3], "0: before and after only"
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2))
    margins = []
    for pair in PAIRS:
        start, end = (
            [answer_log_probs(folder, pair["prompt"], pair[side]).sum().item() for side in ("chosen", "rejected")]
            for folder in ("model", place.checkpoint("a", 3))
        )
        margins.append(0.1 * ((end[0] - start[0]) - (end[1] - start[1])))
    assert max(map(abs, margins)) > 1e-3
    expected = {
        "loss": sum(math.log1p(math.exp(-margin)) for margin in margins) / 4,
        "margin": sum(margins) / 4,
        "pairs/mean": sum(margin > 0 for margin in margins) / 4,
    }
    assert {name: rows[1][f"eval/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert (again["loss"], again["margin"]) == pytest.approx((expected["loss"], expected["margin"]), rel=1e-4, abs=1e-6)
    assert again["mean"] == expected["pairs/mean"]
    torch.manual_seed(0)  # of dropout
    place.train("dpo", "alone", model="model", optim=OPTIM, **changes)
    assert worst(place.weights("a", 3), place.weights("alone", 3)) == 0, "no random numbers are drawn"


def test_rows_that_are_trained_on_too_are_counted_and_the_whole_file_is_measured(place):
    place.rows("chats.jsonl", CHATS)
    place.rows("held.jsonl", [CHATS[1], CHATS[3], {**CHATS[0], "completion": "new"}] * 200)
    data, words = {"path": "chats.jsonl", "rows": None}, ["held.jsonl · 600", "400 of the 600 held-out"]
    place.plan("sft", data=data, eval={"dataset": "held.jsonl"}, words=words)
    place.plan("sft", data=data, eval={"dataset": "held.jsonl", "rows": 2}, words=["held.jsonl · 2 conv", "2 of the 2"])


def test_a_resumed_dpo_run_goes_on_with_the_same_held_out_pairs(place):
    place.rows("held.jsonl", PAIRS)
    place.rows("other.jsonl", [{**PAIRS[0], "rejected": "six"}, *PAIRS[1:]])
    place.train("dpo", "a", eval={"dataset": "held.jsonl"})
    place.run("resume", "a", "steps=4", "eval.dataset=other.jsonl", code=3, words=["other.jsonl: a dpo run goes on"])
    place.run("resume", "a", "steps=4")


def test_a_task_and_the_loss_on_its_examples_are_measured_together(place):
    save_tiny("model")
    examples = EMBEDDED_TASKS["sums"].demonstrations("test")
    place.rows("held.jsonl", [examples[row] for row in range(8)])
    common = {"model": "model", "data": {"path": "sums", "rows": 64}, "batch_size": 16, "optim": OPTIM}
    both = {"env": {"name": "sums"}, "eval": {"rows": 8, "max_tokens": 4, "loss": True}}
    place.train("sft", "both", **common, **both, words=["sums test · 8 conversations", "perplexity"])
    place.train("sft", "alone", **common, eval={"dataset": "held.jsonl"})
    own, alone = ([row for row in read_metrics(f"runs/{name}") if "eval/loss" in row] for name in ("both", "alone"))
    assert [row["eval/loss"] for row in own] == [row["eval/loss"] for row in alone]
    assert own[-1]["eval/loss"] < own[0]["eval/loss"] - 0.05
    assert all(row["eval/sums/count"] == 8 for row in own)
    for options in ((), ("--samples", "2")):
        first, second = map(json.loads, place.run("eval", "both", "--json", *options).out.splitlines())
        assert (first["mean"], second["loss"]) == (0, pytest.approx(own[-1]["eval/loss"], rel=1e-6))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"data": {"path": "held.jsonl"}}, None, "a file, which has no splits: held.jsonl"),
        ({"eval": {"loss": True, "split": "train"}}, 2, "eval.split train is trained on"),
        ({"env": None}, 2, "without env, eval.dataset is measured"),
    ],
)
def test_a_loss_beside_a_task_needs_another_split(place, changes, code, words):
    place.rows("held.jsonl", CHATS)
    settings = {"model": "tiny", "data": {"path": "sums"}, "env": {"name": "sums"}, "eval": {"loss": True}} | changes
    place.plan("sft", code=code, words=[words], **settings)
