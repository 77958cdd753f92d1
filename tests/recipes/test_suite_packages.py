"""`llmrl eval --suite` with the real lm-evaluation-harness and Inspect: their scores are those of known answers.

`scripts/foreign_clients suites` makes the environment that these tests need.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("lm_eval") and find_spec("inspect_ai")), reason="lm-eval and inspect-ai are not installed"
    ),
]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<stop>"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
FILE = """
import json
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

ROWS = [json.loads(line) for line in open("words.jsonl")]


@task
def words():
    return Task([Sample(row["question"], target=row["answer"]) for row in ROWS], solver=generate(), scorer=exact())
"""


def test_three_of_four_known_answers_score_075_in_both_programs(place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place.train("sft", "taught", steps=1)
    folder = place.checkpoint("taught", 1)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows, number = [], 0
    while len(rows) < 4:
        question, number = f"Say {number}.", number + 1
        asked = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = model.generate(**given, do_sample=False, max_new_tokens=6)[0, given["input_ids"].shape[1] :]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        if answer.split():
            rows.append({"question": question, "answer": answer})
    rows[2]["answer"] = "never said"
    place.rows("words.jsonl", rows)
    (place.path / "words.yaml").write_text(TASK)
    (place.path / "words.py").write_text(FILE)
    suites = ("--suite", "lm_eval:words.yaml", "--suite", "inspect:words.py")
    result = place.run("eval", "taught", *suites, "eval.max_tokens=6", "--json")
    first, second = (json.loads(line) for line in result.out.splitlines() if line.startswith("{"))
    assert (first["rows"], first["refused"], first["metrics"]["exact_match"]["value"]) == (4, 0, 0.75)
    assert (second["rows"], second["failed"], second["refused"]) == (4, 0, 0)
    assert second["metrics"]["exact/mean"]["value"] == 0.75
