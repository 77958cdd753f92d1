import json
import math
import re
import sys
import types

import pytest
import torch

from llmrl.errors import ConfigError, DataError, MissingDependencyError
from llmrl.run.metrics import METRICS, MetricsLog, read_metrics


def test_each_step_is_one_json_line_on_disk_when_log_returns(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(1, {"reward/mean": torch.tensor(0.5), "tokens/trained": torch.tensor(12), "reward/exact/mean": 1})
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"step": 1, "reward/mean": 0.5, "tokens/trained": 12, "reward/exact/mean": 1}\n'
        )


def log_step(path, metrics, step=1, **options):
    with MetricsLog(path, **options) as log:
        log.log(step, metrics)


def test_what_is_not_finite_is_null_so_that_every_json_reader_can_read_it(tmp_path):
    log_step(tmp_path, {"policy/loss": math.nan, "policy/grad_norm": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "policy/loss": None, "policy/grad_norm": None}


@pytest.mark.parametrize(
    "name", ["reward/mean", "eval/gsm8k-test/mean", "eval/aime25/pass@16", "reward/exact_match/std"]
)
def test_names_of_the_table_and_of_the_two_families_are_accepted(tmp_path, name):
    log_step(tmp_path, {name: 0.5})
    assert read_metrics(tmp_path) == [{"step": 1, name: 0.5}]


@pytest.mark.parametrize(("name", "meant"), [("reward", ""), ("policy/losss", "policy/loss"), ("eval/mean", "")])
def test_other_names_are_refused_also_where_nothing_is_written(tmp_path, name, meant):
    for enabled in (True, False):
        with pytest.raises(ConfigError, match=f"'{name}' is not a metric.*{meant}"):
            log_step(tmp_path, {name: 1.0}, enabled=enabled)
    assert not read_metrics(tmp_path)


def test_every_metric_of_the_table_has_a_meaning_and_a_well_formed_name():
    for name, meaning in METRICS.items():
        assert re.fullmatch(r"[a-z]+/\w+", name)
        assert meaning


def test_a_resumed_run_drops_the_steps_after_its_checkpoint_and_a_torn_last_line(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.log(step, {"policy/loss": step})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "policy/lo')
    log_step(tmp_path, {"policy/loss": 40.0}, step=4, resume_step=3)
    assert [(row["step"], row["policy/loss"]) for row in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40.0)]


def test_a_new_run_does_not_write_into_the_file_of_another(tmp_path):
    log_step(tmp_path, {"policy/loss": 1.0})
    with pytest.raises(ConfigError, match="the steps of another run"):
        MetricsLog(tmp_path)


def test_a_rank_that_is_not_the_first_writes_nothing(tmp_path):
    log_step(tmp_path / "run", {"policy/loss": 1.0}, enabled=False, mirrors=["wandb"])
    assert not (tmp_path / "run").exists()


def test_lines_of_one_step_are_joined_and_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "policy/loss": 2}\n{"step": 1, "eval/sums/mean": 0.5}\n{"step": 2, "pol')
    assert read_metrics(path) == [{"step": 1, "policy/loss": 2, "eval/sums/mean": 0.5}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"step": 1}\nnonsense\n{"step": 2}\n', r"metrics\.jsonl:2: .*nonsense"),
        (b'{"step": 1, "note": "\xe9"}\n{}\n', r"metrics\.jsonl: must be UTF-8"),
        (b"[" * 100_000 + b"\n{}\n", r"metrics\.jsonl:1: must be a JSON object"),
        (b'{"step": 1%b}\n' % (b"0" * 400), r"metrics\.jsonl:1: must be a JSON object with a step"),
        (b'{"step": 1e999}\n', r"metrics\.jsonl:1: must be a JSON object with a step"),
    ],
)
def test_a_file_that_holds_no_steps_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_metrics(tmp_path)


def test_mirrors_see_every_step(tmp_path):
    calls = []
    mirror = types.SimpleNamespace(log=lambda *a: calls.append(a), close=lambda: calls.append("closed"))
    log_step(tmp_path, {"policy/loss": 1.0}, step=3, mirrors=[mirror])
    assert calls == [(3, {"policy/loss": 1.0}), "closed"]


def test_a_missing_or_unknown_mirror_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises((MissingDependencyError, ModuleNotFoundError), match="tensorboard"):
        MetricsLog(tmp_path, mirrors=["tensorboard"])
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        MetricsLog(tmp_path, mirrors=["wanbd"])
