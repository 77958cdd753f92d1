"""The logs of a run: metrics by step, and rollouts."""

import json
import math
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from llmrl.errors import ConfigError, DataError, MissingDependencyError
from llmrl.run.metrics import METRICS, MetricsLog, read_metrics
from llmrl.run.rollout_log import Rollout, RolloutLog, TokenRecord, ToolCallRecord, read_rollouts


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


TOKENS = TokenRecord(
    ids=[5, 6, 7],
    texts=["<|im_start|>", "<0xE2>", " \x00"],
    roles=["user", "assistant", "assistant"],
    turns=[0, 0, 0],
    control=[True, False, False],
    trained=[False, True, True],
    engine_logp=[None, -0.5, -0.25],
    trainer_logp=[None, -0.75, -0.25],
    advantage=[None, 1.5, 1.5],
    ratio=[None, 0.875, 1.0],
)


def rollout(reward: float | None) -> Rollout:
    return Rollout("1 + 1?", "2 ✓", reward, 0.5, "eos", version=3, tokens=2, group=7)


def test_rollouts_are_read_back_with_their_step_and_a_failed_reward_stays_missing(tmp_path):
    RolloutLog(tmp_path).write(4, [rollout(1.0), rollout(math.nan), rollout(None)])
    rows = read_rollouts(tmp_path)
    assert [row.reward for row in rows] == [1.0, None, None]
    assert rows[0] == Rollout("1 + 1?", "2 ✓", 1.0, 0.5, "eos", version=3, tokens=2, group=7, step=4)


def test_tokens_rewards_and_calls_are_read_back(tmp_path):
    call = ToolCallRecord(0, "calculator", '{"expression": "1 + 1"}', "2", "ok", 0.25)
    given = replace(rollout(1.0), rewards={"exact": 1.0, "style": None}, tool_calls=(call,), prompt_id="ab")
    given = replace(given, columns={"answer": "4", "steps": [1, None], "tests": {"a": True}})
    RolloutLog(tmp_path).write(1, [replace(given, token_record=TOKENS), given])
    first, second = read_rollouts(tmp_path)
    assert first == replace(given, token_record=replace(TOKENS, entropy=[]), step=1)
    assert second == replace(given, step=1)
    assert read_rollouts(tmp_path, tokens=False) == [second, second]


def test_a_file_without_the_newer_columns_is_read(tmp_path):
    from pyarrow import parquet

    path = RolloutLog(tmp_path).write(1, [replace(rollout(1.0), token_record=TOKENS)])
    old = ["step", "group", "prompt", "completion", "reward", "advantage", "stop_reason", "version", "tokens"]
    parquet.write_table(parquet.read_table(path, columns=old), path)
    assert read_rollouts(tmp_path) == [replace(rollout(1.0), step=1)]
    parquet.write_table(parquet.read_table(path, columns=old[:4]), path)
    with pytest.raises(DataError, match=r"must be a Parquet file of rollouts: .*reward"):
        read_rollouts(tmp_path)


def test_text_that_no_file_can_hold_is_escaped(tmp_path):
    hostile = replace(rollout(1.0), completion="a\ud800\0é", token_record=replace(TOKENS, texts=["\udfff", "\0", "é"]))
    RolloutLog(tmp_path).write(1, [hostile])
    (row,) = read_rollouts(tmp_path)
    assert (row.completion, row.token_record.texts) == ("a\\ud800\0é", ["\\udfff", "\0", "é"])


def test_the_columns_are_the_same_even_for_a_step_without_rollouts(tmp_path):
    from pyarrow import parquet

    log = RolloutLog(tmp_path)
    assert parquet.read_schema(log.write(1, [])).equals(parquet.read_schema(log.write(2, [rollout(1.0)])))


def test_a_resumed_run_drops_later_files_and_reads_the_last_one_by_default(tmp_path):
    log = RolloutLog(tmp_path)
    for step in (1, 2, 10):
        log.write(step, [rollout(float(step))])
    assert read_rollouts(tmp_path)[0].step == 10
    RolloutLog(tmp_path, resume_step=2)
    assert read_rollouts(tmp_path)[0].step == 2
    assert read_rollouts(tmp_path, step=1)[0].reward == 1.0
    with pytest.raises(DataError, match="got 10, there: steps 1 to 2"):
        read_rollouts(tmp_path, step=10)


def test_a_damaged_file_is_named(tmp_path):
    path = RolloutLog(tmp_path).write(1, [])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"step000001\.parquet: must be a Parquet file of rollouts"):
        read_rollouts(tmp_path)


def test_a_rank_that_is_not_the_first_neither_writes_nor_removes(tmp_path):
    RolloutLog(tmp_path).write(5, [rollout(1.0)])
    other = RolloutLog(tmp_path, enabled=False, resume_step=1)
    assert other.write(6, [rollout(1.0)]) is None
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step000005.parquet"]
