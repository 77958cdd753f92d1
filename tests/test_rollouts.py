import math

import pytest

from llmrl.errors import DataError
from llmrl.run.rollout_log import Rollout, RolloutLog, read_rollouts


def rollout(reward: float | None) -> Rollout:
    return Rollout("1 + 1?", "2 ✓", reward, 0.5, "eos", version=3, tokens=2, group=7)


def test_rollouts_are_read_back_with_their_step_and_a_failed_reward_stays_missing(tmp_path):
    RolloutLog(tmp_path).write(4, [rollout(1.0), rollout(math.nan), rollout(None)])
    rows = read_rollouts(tmp_path)
    assert [row.reward for row in rows] == [1.0, None, None]
    assert rows[0] == Rollout("1 + 1?", "2 ✓", 1.0, 0.5, "eos", version=3, tokens=2, group=7, step=4)


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
