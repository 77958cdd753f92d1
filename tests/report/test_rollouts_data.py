"""The rollouts of a report: a bounded sample, read from files of any age and state."""

import json
import math
from dataclasses import replace

import pytest

from llmrl.errors import DataError
from llmrl.report.page import as_json
from llmrl.report.rollouts import rollouts_data
from llmrl.run.rollout_log import Rollout, RolloutLog, TokenRecord, ToolCallRecord, read_rollouts
from tests.support.golden import check_golden

ROOM = 10**6


def record(length=4):
    """The first token is the prompt's, the others were sampled and trained, but for the last."""
    sampled = [None, *[-0.123456] * (length - 1)]
    return TokenRecord(
        ids=list(range(length)),
        texts=[f"t{number}" for number in range(length)],
        roles=["user", *["assistant"] * (length - 1)],
        turns=[0] * length,
        control=[True, *[False] * (length - 1)],
        trained=[False, *[True] * (length - 2), False],
        engine_logp=sampled,
        trainer_logp=[*sampled[:-1], None],
    )


def rollout(group, reward, **changes):
    fields = {"advantage": 0.0, "stop_reason": "eos", "version": 0, "tokens": 3, "prompt_id": f"{group:04d}"}
    return Rollout(f"prompt {group}", f"answer {reward}", reward, group=group, **fields | changes)


def write(path, steps, groups=3, **changes):
    log = RolloutLog(path)
    for step in steps:
        log.write(
            step, [rollout(group, float(group + place), **changes) for group in range(groups) for place in (0, 1)]
        )


def test_a_run_without_rollouts_has_nothing_to_show(tmp_path):
    assert rollouts_data(tmp_path, max_bytes=ROOM) is None


def test_a_small_run_is_shown_whole(tmp_path):
    call = ToolCallRecord(0, "calculator", "{}", "42", "ok", 0.123456)
    write(tmp_path, (1, 2), rewards={"exact": 1.0}, tool_calls=(call,), token_record=record())
    data = rollouts_data(tmp_path, max_bytes=ROOM)
    assert (data["steps"], data["num_steps"], data["num_rollouts"], len(data["rollouts"])) == ([1, 2], 2, 12, 12)
    assert (data["vocabulary"], data["control"]) == ({0: "t0", 1: "t1", 2: "t2", 3: "t3"}, [0])
    check_golden("rollout_of_a_report", "".join(f"{name}: {value}\n" for name, value in data["rollouts"][0].items()))


def test_a_long_run_is_sampled_evenly_within_its_room(tmp_path):
    write(tmp_path, range(1, 101), groups=20)
    data = rollouts_data(tmp_path, max_bytes=60_000)
    assert len(json.dumps(data)) < 60_000
    assert (data["steps"][0], data["steps"][-1], data["num_steps"]) == (1, 100, 100)
    assert 10 <= len(data["steps"]) <= 24
    gaps = [later - earlier for earlier, later in zip(data["steps"], data["steps"][1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1
    for step in data["steps"]:
        rows = [row for row in data["rollouts"] if row["step"] == step]
        groups = {row["group"] for row in rows}
        assert len(rows) == 2 * len(groups)  # whole ones
        assert {0, 19} <= groups  # that of the worst answer, of the first prompt, and of the best


def test_the_groups_of_the_best_and_the_worst_answer_come_before_others(tmp_path):
    rewards = {0: 0.5, 1: 0.5, 2: None, 3: 0.5, 4: 1.0, 5: 0.5}
    RolloutLog(tmp_path).write(1, [rollout(group, reward) for group, reward in rewards.items()])
    one = len(json.dumps(rollouts_data(tmp_path, max_bytes=ROOM)["rollouts"])) // 6
    data = rollouts_data(tmp_path, max_bytes=4 * one + 200)
    assert {0, 2, 4} <= {row["group"] for row in data["rollouts"]} != set(rewards)


def test_long_texts_and_many_tokens_keep_their_ends(tmp_path):
    long = rollout(0, 1.0, token_record=record(10**5))
    RolloutLog(tmp_path).write(1, [replace(long, completion="a" * 10**6 + "z")])
    data = rollouts_data(tmp_path, max_bytes=ROOM)
    assert len(json.dumps(data)) < ROOM
    (row,) = data["rollouts"]
    head, left_out, tail = row["completion"]
    assert (len(head) + len(tail) + left_out, head[0], tail[-1]) == (10**6 + 1, "a", "z")
    shown = row["record"]
    first, left_out = shown["left_out"]
    assert len(shown["ids"]) + left_out == 10**5
    assert (shown["ids"][0], shown["ids"][first], shown["ids"][-1]) == (0, first + left_out, 10**5 - 1)
    assert {len(shown["trained"]), len(shown["engine"]), sum(span[2] for span in shown["spans"])} == {len(shown["ids"])}


def test_files_that_are_old_cut_or_empty_are_shown_as_far_as_they_go(tmp_path):
    from pyarrow import parquet

    write(tmp_path, (1, 2, 3, 4), token_record=record())
    old, cut = (tmp_path / "rollouts" / f"step00000{step}.parquet" for step in (1, 2))
    columns = ["step", "group", "prompt", "completion", "reward", "advantage", "stop_reason", "version", "tokens"]
    parquet.write_table(parquet.read_table(old, columns=columns), old)
    cut.write_bytes(cut.read_bytes()[:-20])
    RolloutLog(tmp_path).write(3, [])
    data = rollouts_data(tmp_path, max_bytes=ROOM)
    assert (data["steps"], data["num_steps"], data["unreadable"]) == ([1, 4], 4, [2])
    assert ["record" in row for row in data["rollouts"]] == [False] * 6 + [True] * 6


def test_markup_counts_as_long_as_the_page_writes_it(tmp_path):
    RolloutLog(tmp_path).write(1, [rollout(group, 1.0, prompt_id="<" * 500) for group in range(40)])
    data = rollouts_data(tmp_path, max_bytes=40_000)
    assert data["rollouts"]
    assert len(json.dumps(data).replace("<", "\\u003c")) < 40_000


def test_numbers_that_are_not_finite_are_shown_as_missing(tmp_path):
    infinite = replace(record(), engine_logp=[None, math.inf, -math.inf, -0.5])
    write(
        tmp_path, (1,), rewards={"exact": math.inf}, advantage=-math.inf, token_record=infinite, columns={"x": math.inf}
    )
    data = json.loads(as_json(rollouts_data(tmp_path, max_bytes=ROOM)))
    shown = data["rollouts"][0]
    assert (shown["advantage"], shown["rewards"], shown["record"]["engine"]) == (
        None,
        {"exact": None},
        [None] * 3 + [-0.5],
    )


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("reward", ["high"] * 6),
        ("group", [None] * 6),
        ("prompt", [None] * 6),
        ("tokens", [[1]] * 6),
        ("columns", ["{"] * 6),
        ("columns", ["[1]"] * 6),
        ("rewards", [None] * 6),
        ("token_ids", [["a"]] * 6),
        ("token_texts", [["a"]] * 6),
        ("token_roles", [[None] * 4] * 6),
        ("token_engine_logp", [None] * 6),
    ],
)
def test_a_file_with_other_types_or_nulls_is_named(tmp_path, name, column):
    import pyarrow
    from pyarrow import parquet

    write(tmp_path, (1,), token_record=record())
    path = tmp_path / "rollouts" / "step000001.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.set_column(table.column_names.index(name), name, pyarrow.array(column)), path)
    with pytest.raises(DataError, match=r"step000001\.parquet: must be a Parquet file of rollouts"):
        read_rollouts(tmp_path)
    as_json(rollouts_data(tmp_path, max_bytes=ROOM))
