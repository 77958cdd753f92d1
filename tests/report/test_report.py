"""report.html without a browser: what is read, what is drawn, what is warned of, and what the page may contain."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from llmrl.report import write_report
from llmrl.report.curves import MOST_POINTS, charts, thin
from llmrl.report.intervals import evaluations, interval
from llmrl.report.page import report_data
from llmrl.report.run_files import read_run
from llmrl.report.warnings import findings
from llmrl.run.config import settings
from llmrl.run.metrics import METRICS
from llmrl.train.settings import GRPOConfig
from llmrl.train.settings.preferences import DPOConfig
from tests.support.golden import check_golden
from tests.support.runs import GRPO, evaluation, make_run


def chart(made, title):
    (found,) = [chart for chart in made if chart["title"] == title]
    return found


def add_line(run, **row):
    with run.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")


def charts_of(path, steps=5, changes=None):
    return charts(read_run(make_run(path, steps, changes).path))


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_any_file_gives_a_page_that_says_so(tmp_path):
    data = report_data(read_run(tmp_path))
    assert "No step is finished yet." in data["notes"]
    assert any("run.json" in note for note in data["notes"])
    assert write_report(tmp_path).read_text().startswith("<!doctype html>")


def test_an_older_run_without_counts_quantiles_plan_and_defaults_has_a_page(tmp_path):
    new = ("reward/p10", "reward/p50", "reward/p90")
    run = make_run(tmp_path / "old", 30, base={name: value for name, value in GRPO.items() if name not in new})
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kept = [{name: v for name, v in row.items() if not name.endswith(("sums/std", "sums/count"))} for row in rows]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    run.write_info({name: value for name, value in run.read_info().items() if name not in ("plan", "defaults")})
    data = report_data(read_run(run.path))
    assert chart(data["charts"], "Reward")["band"]["label"] == "mean ± standard deviation"
    assert chart(data["charts"], "Evaluation: sums")["whiskers"] == [{"x": [], "low": [], "high": []}]
    assert data["tables"][1]["rows"][1] == ["optim.lr", "2e-06", "", "command line"]


def test_changes_of_a_curriculums_level_are_marked_in_the_charts_of_learning(tmp_path):
    levels = {"curriculum/level": lambda x: [0, 1, 1, 0, 2][round(4 * x)], "curriculum/puzzles/level": lambda x: 0.0}
    made = charts_of(tmp_path / "one", 5, levels)
    marked = [{"x": 2, "label": "level 1"}, {"x": 4, "label": "level 0"}, {"x": 5, "label": "level 2"}]
    assert chart(made, "Reward")["events"] == chart(made, "Evaluation: sums")["events"] == marked
    assert "events" not in chart(made, "Entropy")
    assert [line["label"] for line in chart(made, "Curriculum: level by source")["lines"]] == ["puzzles"]
    other = charts_of(tmp_path / "mix", 5, {"curriculum/puzzles/level": lambda x: float(x == 1)})
    assert chart(other, "Reward")["events"] == [{"x": 5, "label": "puzzles level 1"}]


def test_what_is_not_a_finite_number_is_left_out(tmp_path):
    run = make_run(tmp_path / "a", 3)
    strange = '{"step": 4, "policy/loss": NaN, "policy/lr": "high", "reward/mean": Infinity, "policy/grad_norm": [1]'
    huge = "1" + "0" * 400
    run.metrics.write_text(f'{run.metrics.read_text()}{strange}, "policy/entropy": {huge}, "reward/std": 0.5}}\n')
    last = read_run(run.path).steps[-1]
    assert {name for name, value in last.items() if value is not None} == {"step", "reward/std"}
    write_report(run.path)


def test_what_looks_like_a_password_is_not_on_the_page(tmp_path):
    config = """
env:
  tools: [{mcp: {servers: {a: {url: "http://me:secret1@host", headers: {X-Auth: secret2}}, b: {env: {KEY: secret3}}}}}]
  rewards: [{judge: {api_key: secret4, api_key_env: MY_KEY, model: judge}}]
sampling: {max_tokens: 7}
"""
    run = make_run(tmp_path / "a", 3, config=config)
    run.write_info({**run.read_info(), "origins": {"env.tools": "a.yaml:3", "env.rewards": "a.yaml:4"}})
    text = write_report(run.path).read_text()
    assert "secret" not in text
    assert "MY_KEY" in text, "the name of a variable is not its value"
    assert read_run(run.path).settings["sampling.max_tokens"] == "7"


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_intervals_are_wilsons_for_scores_of_0_and_1_and_normal_for_others():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        p = right / count
        assert interval(p, math.sqrt(p * (1 - p)), count) == pytest.approx((low, high), abs=5e-5)
    scores = [0.0, 0.1, 1.0, 1.0, 0.1]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    half = 1.959964 * statistics.stdev(scores) / math.sqrt(5)
    assert interval(mean, std, 5) == pytest.approx((mean - half, mean + half))
    assert interval(2.0, 0.0, 1) is None
    assert interval(0.5, 0.5, 0) is None


def test_evaluations_are_found_by_environment():
    rows = [{"step": 0, **evaluation(0.5, 100)}, {"step": 1, "eval/a-b/mean": 2.0}, {"step": 2, **evaluation(0.6, 100)}]
    found = evaluations(rows)
    assert list(found) == ["a-b", "sums"]
    assert str(found["a-b"][0]) == "2.000"
    assert str(found["sums"][1]) == "0.600 [0.502, 0.691]"


def test_every_metric_that_a_run_can_log_is_drawn(tmp_path):
    made = charts_of(tmp_path / "a", 3, {name: lambda x: 0.5 for name in METRICS} | {"reward/f.g/mean": lambda x: 1.0})
    drawn = {line["metric"] for chart in made for line in chart["lines"]}
    assert {*METRICS, "reward/f.g/mean"} - drawn == {
        *("time/step", "reward/p10", "reward/p90"),  # a height, and a band
        *("data/epoch", "perf/train_tok_s_device"),  # multiples of what is drawn
    }
    assert "Other" not in {chart["section"] for chart in made}


def test_phases_add_up_to_the_time_of_a_step(tmp_path):
    phases = chart(charts_of(tmp_path / "a"), "Time per step")
    assert [line["label"] for line in phases["lines"]] == ["generate", "logp", "update", "sync", "rest"]
    assert [sum(values) for values in zip(*(line["y"] for line in phases["lines"]), strict=True)] == [9.0] * 5


def test_the_reward_has_a_band_of_quantiles_unless_all_rewards_are_0_or_1(tmp_path):
    band = chart(charts_of(tmp_path / "a"), "Reward")["band"]
    assert (band["label"], band["low"][0], band["high"][-1]) == ("10th to 90th percentile", 0.1, 1.0)
    binary = {"reward/mean": lambda x: 0.5 + 0.3 * x, "reward/std": lambda x: math.sqrt(0.25 - (0.3 * x) ** 2)}
    assert chart(charts_of(tmp_path / "b", 5, binary), "Reward")["band"] is None


def test_of_a_long_run_the_extremes_are_kept():
    values = [math.sin(i / 7) for i in range(50_000)]
    values[31_337], values[4242] = 9.0, -9.0
    kept = thin(values)
    assert {0, 4242, 31_337, 49_999} <= set(kept)
    assert len(kept) <= MOST_POINTS + 2
    assert kept == sorted(kept)


def test_a_page_of_a_thousand_steps_is_small(tmp_path):
    names = {name: lambda x: 0.123456789 + math.sin(1000 * x) for name in METRICS}
    run = make_run(tmp_path / "long", 1000, names, rollouts=20)
    assert write_report(run.path).stat().st_size < 5e6


# --- warnings --------------------------------------------------------------------------------------------------------


def warned(tmp_path, changes, steps=40, **options):
    return [finding.text for finding in findings(read_run(make_run(tmp_path / "a", steps, changes, **options).path))]


def test_a_run_that_goes_well_has_no_warning(tmp_path):
    assert warned(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward/mean": lambda x: 0.3 + 0.01 * math.sin(1e6 * x * x)}, "The reward is flat: 0.299 in the first"),
        ({"reward/mean": lambda x: 0.3 + 1.2 * x if x < 0.5 else 1.5 - 1.2 * x}, "The reward fell from its best, 0.8"),
        ({"policy/entropy": lambda x: 0.8 * 0.01**x, "reward/mean": lambda x: 0.3 * x}, "The entropy collapses"),
        ({"policy/entropy": lambda x: 0.5 + 4 * x}, "The entropy grows"),
        ({"group/zero_var_frac": lambda x: x}, "groups all rewards are equal"),
        ({"tokens/truncated_frac": lambda x: 0.4 * x}, "of the answers end at the token limit, 4% at the beginning"),
        ({"mismatch/logp_abs_mean": lambda x: 0.01 + 0.09 * x}, "Engine and trainer disagree by 0.09"),
        ({"rollout/failed": lambda x: 3 if x > 0.9 else 0}, "12 rollouts failed, in 4 of 40 steps"),
        ({"policy/loss": lambda x: None if x == 1 else 0.0}, "not a finite number in 1 step, first in step 40"),
        ({"tokens/trained": lambda x: 0 if x == 0 else 9}, "1 step of 40 trained no token"),
        ({"policy/grad_norm": lambda x: 90.0 if x == 1 else 1.0}, "gradient norm was 90 in step 40, 90 times"),
        ({"policy/clip_high_frac": lambda x: 0.4}, "41% of the trained tokens are clipped"),
        ({"mismatch/probe_warnings": lambda x: int(x == 1)}, "looked wrong 1 time;"),
        ({"mismatch/ess": lambda x: 0.3}, "Only 30% of the tokens"),
        ({"async/produced": lambda x: 100, "async/dropped_old": lambda x: 30}, "30% of the groups were dropped"),
        ({"async/engine_idle": lambda x: 0.7}, "The engine waits 70%"),
    ],
)
def test_each_warning_comes_alone_where_it_is_true(tmp_path, changes, words):
    (text,) = warned(tmp_path, changes)
    assert words in text


def test_supervised_runs_have_warnings_of_their_own(tmp_path):
    preferences = {"policy/loss": lambda x: 0.7 + x, "preference/right_frac": lambda x: 0.5}
    preferences["preference/chosen_logp"] = lambda x: -50 - 50 * x
    rises, chance, unlikely = warned(tmp_path, {}, base=preferences)
    assert rises.startswith("The loss rises: 0.79")
    assert chance.startswith("50% of the pairs")
    assert unlikely.startswith("Chosen answers become less likely")


def test_an_evaluation_that_got_worse_beyond_its_intervals_is_a_warning(tmp_path):
    run = make_run(tmp_path / "a", 4)
    add_line(run, step=5, **evaluation(0.45))
    assert findings(read_run(run.path)) == []
    add_line(run, step=6, **evaluation(0.4))
    (finding,) = findings(read_run(run.path))
    assert finding.text.startswith("The evaluation sums got worse: 0.500 [0.456, 0.544] at step 0, 0.400")


def test_a_few_steps_are_no_trend(tmp_path):
    assert warned(tmp_path, {"reward/mean": lambda x: 0.3, "policy/entropy": lambda x: 1 - x}, steps=19) == []


def test_the_settings_that_warnings_name_exist():
    import llmrl.report.warnings as module

    known = {setting.name for config in (GRPOConfig, DPOConfig) for setting in settings(config)}
    text = " ".join(re.findall(r'"([^"]*)"', Path(module.__file__).read_text(encoding="utf-8")))
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = {word for word in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text) if word.partition(".")[0] in sections}
    assert len(named) > 8
    assert named <= known
    assert {"group_size", "zero_variance", "updates_per_step", "overlong_buffer", "truncated"} <= known


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_runs_its_own_scripts_alone(tmp_path):
    run = make_run(tmp_path / "a", 3)
    text = write_report(run.path).read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"']?(https?:|//|/)", text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert "connect-src" not in policy
    for script in re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_text_of_a_run_stays_inside_its_block_whatever_it_is(tmp_path):
    hostile = "</script><script>alert(1)</script><!--\u202e\ud800 {{script}}"
    run = make_run(tmp_path / "a", 3)
    add_line(run, **{"step": 4, f"reward/{hostile}/mean": 1.0, hostile: 2.0})
    run.write_info({**run.read_info(), "recipe": hostile, "origins": {hostile: hostile}, "plan": [[hostile, hostile]]})
    text = write_report(run.path).read_text(encoding="utf-8")
    (block,) = re.findall(r'id="report-data">(.*?)</script>', text, flags=re.DOTALL)
    assert "<" not in block
    data = json.loads(block)
    assert hostile in data["subtitle"]
    assert [hostile, hostile] in data["tables"][0]["rows"]
    assert len(re.findall("<script[ >]", text)) == 4


def test_headline_and_tables_have_what_a_run_was_and_came_to(tmp_path):
    """Scores before and after with their interval; what was measured once has no change, and comes after test sets."""
    whole, once = make_run(tmp_path / "try1", 40), make_run(tmp_path / "once", 1)
    rows = [{"step": 0, **evaluation(0.5)}, {"step": 1, "policy/loss": 2.0, "eval/sums-validation/mean": 0.25}]
    once.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = [report_data(read_run(run.path)) for run in (whole, once)]
    parts = [(page["title"], page["subtitle"], *page["cards"]) for page in pages]
    tables = [*pages[0]["tables"][:2], pages[1]["tables"][2]]  # machine and plan, settings; all metrics
    parts += [(table["title"], *table["rows"]) for table in tables]
    check_golden("report", "".join(f"{row}\n" for part in parts for row in (*part, "")))
    assert chart(pages[1]["charts"], "Loss")["note"] == "", "GRPO's losses alone are near 0"


def test_llmrl_report_writes_the_page_anew_and_says_where(tmp_path, monkeypatch, run_llmrl):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "try1", 3)
    assert run_llmrl("report", "try1").out == "report    runs/try1/report.html\n"
    assert (run.path / "report.html").is_file()
    assert not list(run.path.glob(".*draft"))
    run_llmrl("report", "try2", code=2, words=["did you mean  runs/try1?"])


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
