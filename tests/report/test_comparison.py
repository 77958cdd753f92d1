"""`llmrl compare` in the terminal and as a page."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.golden import check_golden
from tests.support.runs import evaluation, make_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a", 20)
    config = "steps: 40\noptim: {lr: 1.0e-5}\nlog: [wandb]\ngroup_size: 16\n"
    changes = {"reward/mean": lambda x: 0.2, "reward/own/mean": lambda x: 0.7}
    make_run(tmp_path / "runs" / "b", 30, changes, config=config)
    make_run(tmp_path / "elsewhere" / "a", 5)
    return tmp_path


def test_runs_are_shown_side_by_side_with_intervals_and_differences(runs, run_llmrl):
    """Names and settings are not read as markup, and scores without a count have no interval."""
    make_run(runs / "runs" / "c", 3, {"reward/[red]x/mean": lambda x: 1.0}, config="steps: 40\nmodel: '[bold]x'\n")
    path = runs / "runs" / "c" / "metrics.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": 4, **evaluation(0.25), "eval/sums/count": None}) + "\n")
    check_golden("compare", run_llmrl("compare", "a", "b").out + run_llmrl("compare", "a", "c").out)


def test_the_page_has_a_line_for_each_run_and_two_runs_of_one_name_are_told_apart(runs, run_llmrl):
    run_llmrl("compare", "a", "b", "elsewhere/a", "--html", "out.html", words=["report    out.html"])
    (block,) = re.findall(r'id="report-data">(.*?)</script>', (runs / "out.html").read_text(), flags=re.DOTALL)
    data = json.loads(block)
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert [line["label"] for line in charts["Reward"]["lines"]] == ["a", "b", "a (2)"]
    assert [line["x"][-1] for line in charts["Reward"]["lines"]] == [20, 30, 5]
    assert [(line["label"], line["colour"]) for line in charts["Reward of own"]["lines"]] == [("b", 1)]
    assert [line["colour"] for line in charts["Evaluation: sums"]["lines"]] == [0, 1, 2]
    assert len(charts["Evaluation: sums"]["whiskers"]) == 3
    assert "Length: mean" in charts
    assert data["first_tables"][0]["rows"][0] == ["optim.lr", "2e-06", "1e-05", "2e-06"]


def test_what_cannot_be_compared_is_said(runs, run_llmrl):
    run_llmrl("compare", "a", code=2, words=["at least two runs: got a"])
    run_llmrl("compare", "a", "c", code=2, words=["c  is not a run"])
    (runs / "runs" / "b" / "metrics.jsonl").unlink()
    run_llmrl("compare", "a", "b", code=3, words=["b: must have a finished step"])
    words = ["no/folder.html: cannot be written"]
    run_llmrl("compare", "a", "elsewhere/a", "--html", "no/folder.html", code=3, words=words)
