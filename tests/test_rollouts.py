import math
from dataclasses import replace

import pytest

from llmrl.errors import DataError
from llmrl.run.rollout_log import Rollout, RolloutLog, TokenRecord, ToolCallRecord, read_rollouts

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
