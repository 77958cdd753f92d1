import io
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorClass, TensorDict

from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.envs.transforms import Compose
from llmrl.errors import DataError, MissingKeyError
from llmrl.objectives.llm import GroupQuota
from llmrl.objectives.llm.advantage import MCAdvantage

NAN = math.nan


class Tokens(TensorClass["nocast"]):
    full: torch.Tensor


def batch(groups, rewards, done=None, **columns) -> TensorDict:
    """One row per reward; its tokens are as many as its place in the batch, plus one."""
    count = len(rewards)
    rows = LazyStackedTensorDict(*[TensorDict(full=torch.arange(i + 1)) for i in range(count)])
    return TensorDict(
        {
            "tokens": Tokens._from_tensordict(rows),
            "group_id": torch.tensor(groups),
            "next": TensorDict(
                reward=torch.tensor(rewards, dtype=torch.float32).view(count, 1, -1).transpose(1, 2),
                done=torch.ones(count, 1, dtype=torch.bool) if done is None else torch.tensor(done).view(count, 1),
                batch_size=[count],
            ),
            **columns,
        },
        batch_size=[count],
    )


def written(td: TensorDict) -> dict[int, list[float]]:
    out: dict[int, list[float]] = {}
    for group, advantage in zip(td["group_id"].tolist(), td["advantage"].flatten(1).tolist(), strict=True):
        out.setdefault(group, []).extend(advantage)
    return out


def counts(advantage: MCAdvantage, names: str) -> list[int]:
    return [advantage.counters[name] for name in names.split()]


def lengths(td: TensorDict) -> list[int]:
    return [len(row) for row in td.get(("tokens", "full"), as_list=True)]


def test_a_whole_group_is_written_at_once():
    given = batch([3, 3], [0.0, 1.0])
    out = MCAdvantage(2).inv(given)
    # mean .5, unbiased std .707107: .5 / .707107
    assert (out["advantage"].shape, out["advantage"].dtype) == ((2, 1, 1), torch.float32)
    assert out["advantage"].flatten().tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=2e-6)
    assert "advantage" not in given
    assert lengths(out) == [1, 2]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("trajectory_return", "expected"), [
    (None, [[-1.0, 1.0], [1.0, -1.0, 0.0]]),  # each step against the mean 1 of all five
    ("sum", [[-0.5] * 2, [0.5] * 3]),  # 2 against 3
])  # fmt: skip
def test_rewards_per_token_may_differ_in_length_within_a_group(trajectory_return, expected, at_once):
    def row(*rewards):
        after = TensorDict(reward=torch.tensor(rewards).view(-1, 1), done=torch.ones(1, dtype=torch.bool))
        return TensorDict(query="q", next=after)

    rows = LazyStackedTensorDict(row(0.0, 2.0), row(2.0, 0.0, 1.0))
    advantage = MCAdvantage(2, scale="none", trajectory_return=trajectory_return)
    outs = [advantage.inv(part) for part in ([rows] if at_once else rows.split(1))]
    assert outs[:-1] == [None] * (len(outs) - 1)
    assert [row.flatten().tolist() for row in outs[-1].get("advantage", as_list=True)] == expected


PROMPTS = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    "query",
    [
        PROMPTS,
        np.array(PROMPTS),
        np.array(PROMPTS, dtype=object),
        NonTensorStack(*map(np.str_, PROMPTS)),
        NonTensorStack(*[np.array([prompt], dtype=object) for prompt in PROMPTS]),
    ],
    ids=["texts", "array", "objects", "scalars", "arrays of one"],
)
def test_prompts_may_be_texts_or_strings_of_numpy(query):
    given = batch([0] * 4, [0.0, 1.0, 2.0, 5.0]).exclude("group_id")
    given["query"] = query
    out = MCAdvantage(2, scale="none").inv(given)
    assert out["advantage"].flatten().tolist() == [-1.0, -2.0, 1.0, 2.0]
    assert [str(np.asarray(prompt).item()) for prompt in out["query"]] == PROMPTS


def test_more_rows_of_a_prompt_than_a_group_are_several_groups_in_order_of_arrival():
    out = MCAdvantage(2, scale="none").inv(batch([0] * 4, [0.0, 1.0, 4.0, 2.0]))
    assert out["advantage"].flatten().tolist() == [-0.5, 0.5, 1.0, -1.0]


def test_an_incomplete_group_waits():
    advantage = MCAdvantage(3, scale="none")
    assert advantage.inv(batch([1, 2, 1], [0.0, 5.0, 1.0])) is None
    assert advantage.counters["queued"] == 2
    out = advantage.inv(batch([2, 1], [6.0, 2.0]))
    assert written(out) == {1: [-1.0, 0.0, 1.0]}
    assert lengths(out) == [1, 3, 2]
    assert advantage.counters["queued"] == 1
    out = advantage.inv(batch([2], [7.0]))
    assert written(out) == {2: [-1.0, 0.0, 1.0]}
    assert type(out) is TensorDict
    assert advantage.counters == {
        "completed": 2, "written": 2, "dropped": 0, "rescued": 0, "zero_variance": 0, "failed": 0, "evicted": 0,
        "late": 0, "trajectories": 6, "decisions": 6, "return_sum": 21.0, "return_max": 7.0, "queued": 0,
        "queued_trajectories": 0,
    }  # fmt: skip


def test_an_empty_batch_writes_nothing():
    advantage = MCAdvantage(2)
    before = dict(advantage.counters)
    assert advantage.inv(batch([1], [0.0])[:0]) is None
    assert advantage.counters == before


def test_what_waits_is_a_copy():
    advantage = MCAdvantage(2, scale="none")
    given = batch([1], [1.0])
    advantage.inv(given)
    given["next", "reward"].fill_(9)
    given.get(("tokens", "full"), as_list=True)[0].fill_(9)
    out = advantage.inv(batch([1], [0.0]))
    assert written(out) == {1: [0.5, -0.5]}
    assert out.get(("tokens", "full"), as_list=True)[0].tolist() == [0]
    assert out["next", "reward"].flatten().tolist() == [1.0, 0.0]


def test_a_batch_of_whole_groups_waits_for_those_of_its_groups_that_came_before():
    advantage = MCAdvantage(2, scale="none")
    assert advantage.inv(batch([1], [4.0])) is None
    out = advantage.inv(batch([1, 1], [0.0, 1.0]))
    assert written(out) == {1: [2.0, -2.0]}
    assert written(advantage.inv(batch([1], [3.0]))) == {1: [-1.0, 1.0]}


def test_groups_of_equal_rewards_can_be_dropped():
    advantage = MCAdvantage(2, scale="none", on_zero_variance="drop")
    out = advantage.inv(batch([1, 1, 2, 2], [1.0, 1.0, 0.0, 1.0]))
    assert written(out) == {2: [-0.5, 0.5]}
    assert lengths(out) == [3, 4]
    assert advantage.inv(batch([3, 3], [1.0, 1.0])) is None
    assert counts(advantage, "completed written dropped zero_variance") == [3, 1, 2, 2]
    bounded = MCAdvantage(2, scale="none", keep_return_bounds=(0.0, 1.0))
    assert written(bounded.inv(batch([1, 1, 2, 2, 3, 3], [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))) == {2: [-0.5, 0.5]}


def test_groups_whose_rewards_hardly_differ_can_be_dropped_as_equal_ones():
    given = [0.8, 0.9, NAN, 0.0, 1.0, 0.25, 0.25, 0.25, 0.25]  # spreads of 0.1 without the failure, 1 and 0
    for spread, groups in ((0.0, {1, 2}), (0.1, {2}), (1.0, set())):
        advantage = MCAdvantage(3, scale="none", on_zero_variance="drop", min_spread=spread)
        out = advantage.inv(batch([1, 1, 1, 2, 2, 2, 3, 3, 3], given))
        assert set(written(out) if out is not None else ()) == groups
        assert advantage.counters["zero_variance"] == 3 - len(groups)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_failed_rewards_are_left_out_and_counted(split, bad):
    advantage = MCAdvantage(4, scale="none")
    given = batch([1, 1, 1, 1, 2, 2, 2, 2], [0.0, bad, 1.0, 2.0, bad, bad, bad, 1.0])
    outs = [advantage.inv(given[:3]), advantage.inv(given[3:])] if split else [advantage.inv(given)]
    assert written(outs[-1]) == {1: [-1.0, 0.0, 1.0]}
    assert lengths(outs[-1]) == [1, 3, 4]
    assert counts(advantage, "failed written dropped") == [4, 1, 1]


def test_how_many_must_remain_is_a_choice():
    rewards = [0.0, NAN, NAN, 1.0]
    assert written(MCAdvantage(4, scale="none").inv(batch([1] * 4, rewards))) == {1: [-0.5, 0.5]}
    assert MCAdvantage(4, min_group_size=3).inv(batch([1] * 4, rewards)) is None


def test_completions_of_different_policy_versions_are_different_groups():
    advantage = MCAdvantage(2, scale="none")
    given = batch([1, 1, 1, 1], [0.0, 1.0, 5.0, 7.0], policy_version=torch.tensor([1, 2, 1, 2]))
    out = advantage.inv(given)
    assert out["advantage"].flatten().tolist() == [-2.5, -3.0, 2.5, 3.0]
    mixed = batch([1, 1], [0.0, 1.0], policy_version=torch.tensor([1, 2]))
    assert MCAdvantage(2).inv(mixed) is None
    assert MCAdvantage(2, policy_version_key=None).inv(mixed) is not None


def test_the_queue_is_bounded_and_says_what_it_evicted(caplog):
    advantage = MCAdvantage(2, max_queued_groups=3)
    for group in range(5):
        advantage.inv(batch([group], [1.0]))
    assert counts(advantage, "evicted queued") == [2, 3]
    assert "max_queued_groups=3" in caplog.text
    assert advantage.inv(batch([0], [1.0])) is None
    assert advantage.inv(batch([4], [0.0])) is not None


def test_a_flat_batch_is_split_at_its_dones_and_the_rest_waits():
    advantage = MCAdvantage(2, trajectory_return="sum", scale="none")
    given = batch([1, 1, 1, 1, 1], [1.0, 2.0, 3.0, 1.0, 1.0], done=[False, True, True, False, False])
    out = advantage.inv(given)  # returns 3 and 3; the last two steps have not ended
    assert out["advantage"].flatten().tolist() == [0.0, 0.0, 0.0]
    assert lengths(out) == [1, 2, 3]
    out = advantage.inv(batch([1, 1], [4.0, 2.0], done=[True, True]))  # 1 + 1 + 4 = 6 against 2
    assert out["advantage"].flatten().tolist() == [2.0, 2.0, 2.0, -2.0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sum", [1.0, 1.0, -1.0, -1.0]),  # 3 against 1
        ("max", [0.5, 0.5, -0.5, -0.5]),  # 2 against 1
        ("mean", [0.5, 0.5, -0.5, -0.5]),  # 1.5 against 0.5
        (None, [0.0, 1.0, -1.0, 0.0]),  # each step against the mean 1 of all four
    ],
)
def test_steps_of_a_trajectory_share_its_return_where_they_have_one(how, expected):
    given = batch([1] * 4, [1.0, 2.0, 0.0, 1.0], done=[False, True, False, True]).reshape(2, 2)
    out = MCAdvantage(2, trajectory_return=how, scale="none").inv(given)
    assert out.batch_size == (4,)
    assert out["advantage"].flatten().tolist() == expected


@pytest.mark.parametrize("split", [False, True])
def test_several_rewards_in_one_row(split):
    given = batch([1, 1], [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    assert given["next", "reward"].shape == (2, 3, 1)
    advantage = MCAdvantage(2, trajectory_return="sum", scale="none")
    out = advantage.inv(given) if not split else (advantage.inv(given[:1]), advantage.inv(given[1:]))[1]
    assert out["advantage"].shape == (2, 3, 1)
    assert out["advantage"].flatten(1).tolist() == [[3.0] * 3, [-3.0] * 3]
    out = MCAdvantage(2, scale="none").inv(given)
    assert out["advantage"].flatten(1).tolist() == [[0.0, 1.0, 2.0], [-1.0] * 3]


def test_a_batch_without_an_end_is_refused():
    with pytest.raises(DataError, match="True in 0 of 2 steps"):
        MCAdvantage(2).inv(batch([1, 1], [0.0, 1.0], done=[False, False]))
    with pytest.raises(DataError, match="not in the last one"):
        MCAdvantage(2).inv(batch([1] * 4, [0.0] * 4, done=[True, False, True, True]).reshape(2, 2))
    with pytest.raises(MissingKeyError, match=r"reads \('next', 'done'\)"):
        MCAdvantage(2).inv(batch([1, 1], [0.0, 1.0]).exclude(("next", "done")))
    with pytest.raises(MissingKeyError, match="reads 'query'"):
        MCAdvantage(2).inv(batch([1, 1], [0.0, 1.0]).exclude("group_id"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grpo_size": 1}, "a group of one has no baseline"),
        ({"grpo_size": 4, "min_group_size": 5}, "between 2 and grpo_size=4"),
        ({"grpo_size": 4, "min_group_size": 1}, "between 2 and grpo_size=4"),
        ({"grpo_size": 4, "trajectory_return": "last"}, "'last'"),
        ({"grpo_size": 4, "scale": "std"}, "'std'"),
        ({"grpo_size": 4, "on_zero_variance": "raise"}, "'raise'"),
        ({"grpo_size": 4, "min_spread": 0.1}, "needs on_zero_variance='drop', without reward_weights: got 0.1"),
        ({"grpo_size": 4, "min_spread": -0.1, "on_zero_variance": "drop"}, "at least 0"),
        ({"grpo_size": 4, "keep_return_bounds": (1.0, 0.0)}, "low < high"),
        ({"grpo_size": 4, "keep_return_bounds": (0.0,)}, "low < high"),
        ({"grpo_size": 4, "eps": -1.0}, "-1.0"),
        ({"grpo_size": 4, "eps": NAN}, "eps must not be negative: got nan"),
        ({"grpo_size": 4, "max_queued_groups": 0}, "positive"),
        ({"grpo_size": 4, "scale": "raw", "on_zero_variance": "drop"}, "equal rewards teach too"),
        ({"grpo_size": 4, "candidate_group_size": 3}, "at least grpo_size=4: got 3"),
        ({"grpo_size": 4, "candidate_selection_min_size": 4}, "need candidate_group_size"),
        ({"grpo_size": 4, "candidate_selector": lambda group, size: None}, "need candidate_group_size"),
        ({"grpo_size": 4, "candidate_group_size": 8, "candidate_selection_min_size": 3}, "between grpo_size=4"),
        ({"grpo_size": 4, "candidate_group_size": 8, "candidate_selection_min_size": 9}, "=8: got 9"),
        ({"grpo_size": 4, "candidate_group_size": 8, "candidate_selector": "best"}, "must be callable: got 'best'"),
    ],
)
def test_invalid_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MCAdvantage(**arguments)


def test_the_queue_is_part_of_the_state():
    advantage = MCAdvantage(2, scale="none", trajectory_return="sum")
    advantage.inv(batch([1, 2, 2], [1.0, 1.0, 1.0], done=[True, True, False]))
    file = io.BytesIO()
    torch.save(advantage.state_dict(), file)
    file.seek(0)
    other = MCAdvantage(2, scale="none", trajectory_return="sum")
    other.load_state_dict(torch.load(file, weights_only=False))
    given = batch([1, 2], [0.0, 3.0])
    assert written(advantage.inv(given)) == written(other.inv(given)) == {1: [0.5, -0.5], 2: [-1.5, 1.5, 1.5]}
    assert advantage.counters == other.counters


def test_a_state_of_larger_groups_closes_no_group_for_good():
    """Regression: a loaded group of more completions than are taken now was closed, and its name ignored, for good."""
    larger, advantage = MCAdvantage(4), MCAdvantage(2, scale="none")
    assert larger.inv(batch([1, 1, 1], [0.0, 1.0, 1.0])) is None
    advantage.load_state_dict(larger.state_dict())
    assert written(advantage.inv(batch([1], [2.0]))) == {1: [-1.0, 0.0, 0.0, 1.0]}
    assert feed(advantage, [0.0, 1.0]) == [None, [0.0, 1.0]]
    assert advantage.counters["late"] == 0


def feed(advantage, rewards, group=1):
    """One completion per call; what each call gave, as rewards."""
    outs = [advantage.inv(batch([group], [reward])) for reward in rewards]
    return [None if out is None else out["next", "reward"].flatten().tolist() for out in outs]


def test_candidates_are_written_as_soon_as_rewards_among_them_differ():
    advantage = MCAdvantage(2, scale="none", candidate_group_size=5)
    assert feed(advantage, [0.0, 0.0, 1.0, 1.0, 0.0]) == [None, None, [0.0, 1.0], None, None]
    assert counts(advantage, "queued completed written dropped rescued late") == [0, 1, 1, 0, 1, 2]
    assert feed(advantage, [1.0, 0.0]) == [None, [1.0, 0.0]]  # all five came: the next is another group of that name
    assert advantage.counters["rescued"] == 1  # not needed


def test_a_selection_can_wait_for_more_and_takes_the_extremes():
    advantage = MCAdvantage(2, scale="none", candidate_group_size=4, candidate_selection_min_size=4)
    assert feed(advantage, [0.5, 0.0, 1.0, 0.4]) == [None, None, None, [0.0, 1.0]]
    assert written(advantage.inv(batch([3, 3, 3, 3], [0.5, 0.0, 1.0, 0.4]))) == {3: [-0.5, 0.5]}


def test_candidates_of_equal_rewards_are_dropped_at_the_maximum():
    advantage = MCAdvantage(2, candidate_group_size=3)
    assert feed(advantage, [1.0, 1.0, 1.0]) == [None] * 3
    assert counts(advantage, "completed dropped queued late") == [1, 1, 0, 0]
    bounded = MCAdvantage(2, candidate_group_size=4, keep_return_bounds=(0.4, 0.6))
    assert feed(bounded, [0.0, 0.3, 0.2, 1.0]) == [None, None, None, [0.0, 1.0]]
    assert bounded.counters["rescued"] == 1


def test_a_selector_sees_the_batch_and_may_answer_with_indices_a_mask_or_none():
    seen = []

    def longest(group, size):
        seen.append((group.get(("tokens", "full"), as_list=True), group["return"].tolist()))
        return [0, 2] if len(group) == 3 else None

    advantage = MCAdvantage(2, scale="none", candidate_group_size=3, candidate_selector=longest)
    out = advantage.inv(batch([1, 1, 1], [0.0, 1.0, 4.0]))
    assert lengths(out) == [1, 3]
    assert [returns for _, returns in seen] == [[0.0, 1.0], [0.0, 1.0, 4.0]]
    assert [len(row) for row in seen[1][0]] == [1, 2, 3]
    masked = MCAdvantage(2, candidate_group_size=3, candidate_selector=lambda group, size: group["return"] < 5)
    assert lengths(masked.inv(batch([1, 1, 1], [0.0, 1.0, 9.0]))) == [1, 2]
    for wrong in ([0], [0, 0], [0, 7]):
        chosen = MCAdvantage(2, candidate_group_size=3, candidate_selector=lambda group, size, wrong=wrong: wrong)
        with pytest.raises(DataError, match="must choose 2 different rows of 2"):
            chosen.inv(batch([1, 1], [0.0, 1.0]))


def test_failed_candidates_are_not_chosen():
    advantage = MCAdvantage(2, scale="none", candidate_group_size=4)
    assert feed(advantage, [NAN, 0.0, 1.0, NAN]) == [None, None, [0.0, 1.0], None]
    assert counts(advantage, "failed late") == [1, 1]
    few = MCAdvantage(4, scale="none", min_group_size=2, candidate_group_size=5)
    assert feed(few, [NAN, 0.0, NAN, 1.0, NAN]) == [None] * 4 + [[0.0, 1.0]]
    assert counts(few, "failed written") == [3, 1]
    none = MCAdvantage(2, candidate_group_size=3)
    assert feed(none, [NAN, NAN, NAN]) == [None] * 3
    assert counts(none, "failed dropped") == [3, 1]


def test_candidates_of_several_turns_are_chosen_by_their_return():
    given = batch([1] * 6, [1.0, 2.0, 0.0, 1.0, 5.0, 5.0], done=[False, True] * 3)
    advantage = MCAdvantage(2, scale="none", trajectory_return="sum", candidate_group_size=3,
                            candidate_selection_min_size=3)  # fmt: skip
    out = advantage.inv(given)
    assert lengths(out) == [3, 4, 5, 6]
    assert out["advantage"].flatten().tolist() == [-4.5, -4.5, 4.5, 4.5]


def test_counters_are_exact_and_can_be_reset():
    advantage = MCAdvantage(2, scale="none", trajectory_return="sum", on_zero_variance="drop", candidate_group_size=3)
    advantage.inv(batch([1, 1, 2], [2.0, 3.0, -4.0], done=[False, True, True]))
    advantage.inv(batch([1, 2, 1], [5.0, -4.0, 1.0]))
    assert advantage.counters == {
        "completed": 1, "written": 1, "dropped": 0, "rescued": 1, "zero_variance": 0, "failed": 0, "evicted": 0,
        "late": 0, "trajectories": 5, "decisions": 6, "return_sum": 3.0, "return_max": 5.0, "queued": 1,
        "queued_trajectories": 2,
    }  # fmt: skip
    advantage.reset_counters()
    names = "trajectories return_sum return_max queued queued_trajectories"
    assert counts(advantage, names) == [0, 0, -math.inf, 1, 2]


@pytest.mark.parametrize("candidates", [{}, {"candidate_group_size": 4}])
def test_clearing_the_queue_keeps_the_counters(candidates):
    advantage = MCAdvantage(2, scale="none", **candidates)
    advantage.inv(batch([1, 1, 2, 3], [0.0, 1.0, 1.0, 1.0], done=[True, True, True, False]))
    before = dict(advantage.counters)
    assert before["queued"] == before["queued_trajectories"] == 1
    advantage.clear_queues()
    assert advantage.counters == {**before, "queued": 0, "queued_trajectories": 0}
    assert advantage.inv(batch([2], [0.0])) is None
    out = advantage.inv(batch([3, 3], [4.0, 2.0]))  # the started step of 3 is forgotten
    assert written(out) == {3: [1.0, -1.0]}


@pytest.mark.parametrize(
    "rewards", [[0.0, NAN, 1.0, 2.0, 5.0, 5.0], [[0, 0], [NAN, 1], [1, 0], [2, 0], [5, 0], [5, 0]]]
)
def test_whole_batches_and_single_rows_count_the_same(rewards):
    whole, single = MCAdvantage(2), MCAdvantage(2)
    given = batch([1, 2, 1, 2, 3, 3], rewards)
    whole.inv(given)
    for row in range(6):
        single.inv(given[row : row + 1])
    assert whole.counters == single.counters
    assert counts(whole, "trajectories failed return_sum") == [5, 1, 13.0]


@pytest.mark.parametrize("split", [False, True])
def test_whitening_divides_by_the_moments_over_the_trained_tokens(split):
    rewards, counts = [1.0, 0.0, 0.5, 2.0], [3, 1, 4, 2]
    masks = LazyStackedTensorDict(*[TensorDict(all_assistant_mask=torch.arange(6) < 1 + count) for count in counts])
    given = batch([1, 1, 2, 2], rewards, masks=masks)  # the first token of a row follows nothing, and counts nowhere
    for scale, base in (("raw", rewards), ("none", [0.5, -0.5, -0.75, 0.75])):
        advantage = MCAdvantage(2, scale=scale, whiten=True)
        if split:  # what one call writes is what is whitened: the first half waits
            assert advantage.inv(given[::2]) is None
            out = advantage.inv(given[1::2])
        else:
            out = advantage.inv(given)
        tokens = torch.tensor(base, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        expected = (torch.tensor(base, dtype=torch.float64) - tokens.mean()) / tokens.std(unbiased=False)
        assert (out["advantage"].shape, out["advantage"].dtype) == ((4, 1, 1), torch.float32)
        assert out["advantage"].flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    with pytest.raises(MissingKeyError, match="all_assistant_mask"):
        MCAdvantage(2, whiten=True).inv(given.exclude("masks"))


PARTS = {("next", "reward_right"): 1.0, ("next", "reward_brief"): 0.1}
RIGHT, BRIEF = [1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], [-5, -9, NAN, -2, -7, -7, -7, -7, -3, -1, -2, NAN]


def of_two_rewards() -> TensorDict:
    """Rewards of two functions; the second does not apply to all, and the last completion failed."""
    given = batch(
        [i // 4 for i in range(12)], [r + 0.1 * (0 if math.isnan(b) else b) for r, b in zip(RIGHT, BRIEF, strict=True)]
    )
    for key, values in zip(PARTS, (RIGHT, BRIEF), strict=True):
        given[key] = torch.tensor(values, dtype=torch.float32).view(12, 1, 1)
    given["next", "reward"][-1] = NAN
    return given


def gdpo(eps=1e-6) -> list[float]:
    """By hand: each reward over the standard deviation of its group, their weighted sum, then that over all."""
    sums = []
    for start, count in ((0, 4), (8, 3)):  # the group of equal rewards has no gradient and is left out
        total = np.zeros(count)
        for weight, values in ((1.0, RIGHT), (0.1, BRIEF)):
            own = np.array(values[start : start + count], dtype=float)
            if np.nanmax(own) > np.nanmin(own):
                total += weight * np.nan_to_num((own - np.nanmean(own)) / (np.nanstd(own, ddof=1) + eps))
        sums += total.tolist()
    return ((np.array(sums) - np.mean(sums)) / (np.std(sums, ddof=1) + eps)).tolist()


@pytest.mark.parametrize(
    "settings", [{"scale": "batch"}, {"scale": "batch", "whiten": True}, {"whiten": True}, {"reward_weights": PARTS}]
)
def test_the_batch_of_three_processes_is_that_of_one(settings):
    settings = {"scale": "none", "on_zero_variance": "drop", **settings}
    given = of_two_rewards()  # the second process has a group of equal rewards, left out
    given["masks"] = LazyStackedTensorDict(
        *[TensorDict(all_assistant_mask=torch.arange(9) < 2 + i % 5) for i in range(12)]
    )
    whole = written(MCAdvantage(4, **settings).inv(given))
    barrier, sent = threading.Barrier(3, timeout=60), {}

    def process(rank):
        def gather(values):
            sent[rank] = values
            barrier.wait()
            received = [value for other in range(3) for value in sent[other]]
            barrier.wait()
            return received

        return MCAdvantage(4, **settings, gather=gather).inv(given[4 * rank : 4 * rank + 4])

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(process, range(3)))
    assert parts[1] is None
    got = written(parts[0]) | written(parts[2])
    assert got == {group: pytest.approx(values, abs=1e-6) for group, values in whole.items()}


@pytest.mark.parametrize("split", [False, True])
def test_rewards_are_normalised_one_by_one_and_then_their_weighted_sum(split):
    advantage, given = MCAdvantage(4, reward_weights=PARTS, on_zero_variance="drop"), of_two_rewards()
    if split:
        assert advantage.inv(given[::2]) is None
    out = advantage.inv(given[1::2] if split else given)
    # The rows of the first call come first in their group; a row has as many tokens as its place, plus one.
    values = dict(zip(lengths(out), out["advantage"].flatten().tolist(), strict=True))
    assert [values[length] for length in sorted(values)] == pytest.approx(gdpo(), abs=1e-6)
    assert counts(advantage, "written dropped zero_variance failed") == [2, 1, 1, 1]
    with pytest.raises(MissingKeyError, match="reward_right"):
        MCAdvantage(4, reward_weights=PARTS).inv(batch([1] * 4, [0.0, 1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match=r"reward_weights.* not supported"):
        MCAdvantage(4, reward_weights=PARTS, scale="batch")


def test_raw_rewards_go_through_as_they_are():
    assert written(MCAdvantage(2, scale="raw").inv(batch([1, 1, 2, 2], [1.0, 1.0, 0.0, 3.0]))) == {1: [1, 1], 2: [0, 3]}


def test_a_quota_fills_a_buffer_to_its_groups_and_no_further():
    quota = GroupQuota(2)
    transform = Compose(quota, MCAdvantage(2, scale="none", on_zero_variance="drop"))
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=transform)
    buffer.extend(batch([1, 1, 2, 2], [0.0, 1.0, 1.0, 1.0]))
    assert (len(buffer), quota.missing) == (2, 1)
    buffer.extend(batch([4, 3, 4, 3], [0.0, 1.0, 3.0, 2.0]))
    assert (len(buffer), quota.missing, quota.surplus) == (4, 0, 1)
    assert written(buffer[:]) == {1: [-0.5, 0.5], 4: [-1.5, 1.5]}
    buffer.extend(batch([5, 5], [0.0, 1.0]))
    assert (len(buffer), quota.surplus) == (4, 2)
    quota.reset()
    buffer.empty()
    buffer.extend(batch([6, 6], [0.0, 1.0]))
    assert (len(buffer), quota.missing) == (2, 1)
    with pytest.raises(ValueError, match="num_groups must be at least 1"):
        GroupQuota(0)
    with pytest.raises(MissingKeyError, match="group_id"):
        quota.inv(batch([6, 6], [0.0, 1.0]).exclude("group_id"))


def test_in_front_of_a_buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(2, scale="none"))
    assert buffer.extend(batch([1, 2], [0.0, 3.0])).tolist() == []
    assert buffer.add(batch([1], [1.0])[0]).tolist() == [0, 1]
    assert buffer.extend(batch([2, 3, 3], [5.0, 1.0, 1.0])).tolist() == [2, 3, 4, 5]
    assert len(buffer) == 6
    rows = buffer[:]
    assert written(rows) == {1: [-0.5, 0.5], 2: [-1.0, 1.0], 3: [0.0, 0.0]}
    assert lengths(buffer.sample(6))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_completed_group_is_written_once_however_the_rows_arrive(data):
    size, count = 3, 4
    groups = data.draw(st.permutations([group for group in range(count) for _ in range(size)]))
    rewards = data.draw(st.lists(st.integers(0, 3), min_size=len(groups), max_size=len(groups)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(groups) - 1), max_size=4)))
    advantage, got = MCAdvantage(size, scale="none"), {}
    given = batch(groups, [float(reward) for reward in rewards])
    for start, end in zip([0, *cuts], [*cuts, len(groups)], strict=True):
        out = advantage.inv(given[start:end])
        if out is not None:
            for group, values in written(out).items():
                assert group not in got
                got[group] = values
    for group in range(count):
        own = [reward for reward, number in zip(rewards, groups, strict=True) if number == group]
        assert got[group] == pytest.approx([reward - sum(own) / size for reward in own], abs=1e-6)
    assert counts(advantage, "written queued") == [count, 0]
