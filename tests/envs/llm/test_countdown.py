"""Countdown: expressions are read by a bounded parser, and generated problems can be solved."""

import itertools
from fractions import Fraction

import pytest

from llmrl.envs.llm import ChatEnv, CountdownEnv, CountdownRewardParser
from llmrl.envs.llm.tasks.countdown import countdown_correct, countdown_problems
from llmrl.errors import ConfigError, DataError, MissingKeyError
from tests.support.refusals import refusals

RIGHT = ["55 + 36 - 7 - 19", "(55 + 36) - (7 + 19)", "55+36-7-19=65", "$55 + 36 - 7 - 19$"]
RIGHT += ["55 + 36 - 7 \N{MINUS SIGN} 19"]
WRONG = ["36 + 55 - 7", "65", "55 + 36 - 7 - 19 + 7 - 7", "55 + 36 - 26", "55.0 + 36 - 7 - 19", "55 // 7 + 36 + 19"]
WRONG += ["55 + 36 - 7 - 19; import os", "__import__('os')", "max(55, 36) - 7", "55 ** 1", "55 / (7 - 7)", "(55 + 36"]
WRONG += [""]


@pytest.mark.parametrize(("expression", "right"), [(e, True) for e in RIGHT] + [(e, False) for e in WRONG])
def test_an_expression_makes_the_target_from_numbers_used_once(expression, right):
    assert countdown_correct(expression, [19, 36, 55, 7], 65) is right


def test_fractions_on_the_way_do_not_matter():
    assert countdown_correct("3 * (7 / 3)", [3, 3, 7], 7)
    assert countdown_correct("8 \\div 3 \\times 3", [3, 3, 8], 8)
    assert not countdown_correct("7 / 3", [3, 7], 2)


def test_columns_that_are_missing_are_named(answered):
    env = ChatEnv(batch_size=[1]).append_transform(CountdownRewardParser())
    with pytest.raises(MissingKeyError, match="'nums'"):
        answered(env, ["4"])


def reachable(values: list[Fraction], target: int) -> bool:
    if target in values:
        return True
    for a, b in itertools.permutations(range(len(values)), 2):
        rest = [v for i, v in enumerate(values) if i not in (a, b)]
        x, y = values[a], values[b]
        results = [x + y, x - y, x * y] + ([x / y] if y else [])
        if any(reachable([*rest, result], target) for result in results):
            return True
    return False


def test_generated_problems_have_solutions_and_no_split_shares_numbers():
    splits = {split: countdown_problems(split, 60) for split in ("train", "validation", "test")}
    numbers = {split: {tuple(sorted(row["nums"])) for row in rows} for split, rows in splits.items()}
    assert not numbers["train"] & numbers["test"]
    assert not numbers["validation"] & (numbers["train"] | numbers["test"])
    for row in splits["test"]:
        assert reachable([Fraction(n) for n in row["nums"]], row["target"])
        assert 10 <= row["target"] <= 99
        assert row["target"] not in row["nums"]
    assert {len(row["nums"]) for row in splits["train"]} == {3, 4}
    assert countdown_problems("test", 60) == splits["test"]


def test_the_environment_runs_without_a_dataset(say):
    env = CountdownEnv(num_envs=2, seed=0, split="test")
    assert env.reset()["history"].prompt.shape == (2, 2)
    found, expected = CountdownEnv.rows(split="test")[:3], countdown_problems("test", 3)
    assert [row["target"] for row in found] == [row["target"] for row in expected]


GOOD, MISNAMED = {"nums": [1, 2], "target": 3}, {"numbers": [1], "target": 1}
test_rows_and_arguments_that_cannot_be_used_are_refused = refusals(
    (DataError, "row 2 .*nums and target.*numbers, target", lambda: CountdownEnv(dataset=[GOOD, MISNAMED])),
    (DataError, "row 2 .*'12' and 'x'", lambda: CountdownEnv(dataset=[GOOD, {"nums": "12", "target": "x"}])),
    (DataError, "nums .*whole numbers", lambda: CountdownEnv(dataset=[GOOD, {"nums": [], "target": 1}])),
    (ConfigError, r"validation.*got 'tset'\. Did you mean 'test'", lambda: countdown_problems("tset")),
    (ConfigError, "at least 2 numbers", lambda: countdown_problems(size=1)),
)
