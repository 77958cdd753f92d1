import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.objectives.llm.groups import group_advantage, whitened
from tests.support.refusals import refusals

REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0]])

# The same batch under every convention in use: reward minus mean .375 and .75, std .478714 and .5 (unbiased).
GOLDEN = {
    ("group", 1e-4): [1.305310, -0.783186, 0.261062, -0.783186, 0.499900, 0.499900, 0.499900, -1.499700],
    ("group", 1e-6): [1.305580, -0.783348, 0.261116, -0.783348, 0.499999, 0.499999, 0.499999, -1.499997],
    ("group", 1e-9): [1.305582, -0.783349, 0.261116, -0.783349, 0.5, 0.5, 0.5, -1.5],
    ("clamp", 1e-6): [1.305582, -0.783349, 0.261116, -0.783349, 0.5, 0.5, 0.5, -1.5],
    ("population", 1e-8): [1.507557, -0.904534, 0.301511, -0.904534, 0.577350, 0.577350, 0.577350, -1.732051],
    ("none", 1e-4): [0.625, -0.375, 0.125, -0.375, 0.25, 0.25, 0.25, -0.75],
    ("loo", 1e-4): [0.833333, -0.5, 0.166667, -0.5, 0.333333, 0.333333, 0.333333, -1.0],
    ("loo_std", 1e-6): [2.886741, -0.999998, 0.288675, -0.999998, 0.577349, 0.577349, 0.577349, -1.0],
    ("batch", 1e-4): [1.261058, -0.756635, 0.252212, -0.756635, 0.504423, 0.504423, 0.504423, -1.513270],
    ("max_rl", 1e-4): [1.666667, -1.0, 0.333333, -1.0, 0.333333, 0.333333, 0.333333, -1.0],
}
SCALES = sorted({scale for scale, _ in GOLDEN})


@pytest.mark.parametrize(("scale", "eps"), GOLDEN)
def test_golden_values(scale, eps):
    expected = torch.tensor(GOLDEN[scale, eps], dtype=torch.float64)
    assert (group_advantage(REWARDS, scale=scale, eps=eps).flatten() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("reward", "size"), [(0.98, 15), (0.9, 30), (0.001, 8), (0.0, 4), (1.0, 2)])
def test_equal_rewards_give_exactly_zero(scale, dtype, reward, size):
    advantage = group_advantage(torch.full((size,), reward, dtype=dtype), scale=scale, eps=0.0)
    assert advantage.tolist() == [0.0] * size


def test_the_arithmetic_is_float64_whatever_comes_in():
    rewards = torch.tensor([0.98, 0.98, 0.1, 0.7])
    assert rewards.dtype == torch.float32
    advantage = group_advantage(rewards)
    assert advantage.dtype == torch.float64
    assert torch.equal(advantage, group_advantage(rewards.double()))


@pytest.mark.parametrize("scale", SCALES)
def test_an_absent_completion_counts_in_no_mean(scale):
    holes = torch.tensor([[1.0, math.nan, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0, math.nan]])
    advantage = group_advantage(holes, scale=scale)
    assert advantage.isnan().tolist() == holes.isnan().tolist()
    whole = group_advantage(REWARDS, scale=scale)
    assert torch.allclose(advantage[0, [0, 2, 3, 4]], whole[0, [0, 1, 2, 3]], rtol=0, atol=1e-12)
    assert torch.allclose(advantage[1, :4], whole[1], rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=12),
    scale=st.sampled_from(["group", "population", "clamp", "none", "loo", "batch"]),
)
def test_advantages_of_a_group_are_finite_sum_to_zero_and_keep_the_order(rewards, scale):
    values = torch.tensor(rewards, dtype=torch.float64)
    advantage = group_advantage(values, scale=scale)
    assert advantage.isfinite().all()
    assert abs(advantage.sum().item()) < 1e-9
    order = values.argsort(stable=True)
    assert (advantage[order].diff() >= -1e-12).all()


def test_raw_rewards_have_no_baseline_and_no_exact_zero():
    assert group_advantage(torch.tensor([[1.0, 1.0], [0.0, math.nan]]), scale="raw")[0].tolist() == [1.0, 1.0]
    assert group_advantage(torch.tensor([0.25, math.nan]), scale="raw")[1].isnan()


def test_whitening_is_that_of_the_tokens_written_out():
    values, counts = torch.tensor([1.0, 0.0, 0.5, 7.0]), torch.tensor([3, 5, 2, 0])
    tokens = values.double().repeat_interleave(counts)
    expected = (values.double() - tokens.mean()) / tokens.std(unbiased=False)
    torch.testing.assert_close(whitened(values, counts), expected)
    assert whitened(torch.full((7,), 0.98), torch.arange(1, 8)).tolist() == [0.0] * 7
    assert whitened(values, torch.zeros(4)).tolist() == [0.0] * 4
    tiny = whitened(torch.tensor([0.0, 1e-6]), torch.ones(2))  # a variance below 1e-8 is not blown up
    assert tiny.abs().max() < 1e-2


test_invalid_arguments_are_refused = refusals(
    (ValueError, "one of group, population", lambda: group_advantage(REWARDS, scale="std")),
    (ValueError, r"\[N, G\]", lambda: group_advantage(REWARDS.unsqueeze(0))),
    (ValueError, "must not be negative", lambda: group_advantage(REWARDS - 1, scale="max_rl")),
)
