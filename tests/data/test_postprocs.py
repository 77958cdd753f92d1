"""Rewards over several steps, against plain Python over one row at a time."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from llmrl.data.postprocs import DensifyReward, MultiStep
from llmrl.data.ted_utils import segment_ids, steps_left, sum_ahead, trajectory_ends
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from tests.support.refusals import refusals


def rows(steps, ends=(), **entries):
    """One stream: observations 0, 1, ..., next ones 1, 2, ..., rewards of 1, done at ``ends``."""
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[list(ends)] = True
    following = TensorDict(obs=torch.arange(1, steps + 1), reward=torch.ones(steps, 1), done=done, batch_size=[steps])
    following["terminated"], following["truncated"] = done.clone(), torch.zeros_like(done)
    return TensorDict(obs=torch.arange(steps), next=following, batch_size=[steps], **entries)


def flat(value):
    return value.flatten().tolist()


def test_the_golden_batch():
    """An end at row 3 of 6, three steps, half of the reward per step."""
    out = MultiStep(0.5, 3)(rows(6, ends=[3]))
    assert flat(out["next", "obs"]) == [3, 4, 4, 4, 6, 6]
    assert flat(out["next", "reward"]) == [1.75, 1.75, 1.5, 1, 1.5, 1]
    assert flat(out["steps_to_next_obs"]) == [3, 3, 2, 1, 2, 1]
    assert flat(out["gamma"]) == [0.125, 0.125, 0.25, 0.5, 0.25, 0.5]
    assert flat(out["nonterminal"]) == [True, True, True, False, True, False]
    assert flat(out["obs"]) == [0, 1, 2, 3, 4, 5]
    moved = [False, True, True, True, False, False]  # with the observation, so that targets stop at the end
    assert flat(out["next", "done"]) == flat(out["next", "terminated"]) == moved
    assert not out["next", "truncated"].any()
    assert flat(out["next", "original_done"]) == [False, False, False, True, False, False]


def test_agents_that_end_at_different_times_have_windows_of_their_own():
    reward = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]).unsqueeze(-1)
    done = torch.tensor([[False, False], [True, False], [False, False]]).unsqueeze(-1)
    batch = TensorDict(next=TensorDict(reward=reward, done=done, obs=reward.clone(), batch_size=[3]), batch_size=[3])
    out = MultiStep(1.0, 2)(batch)
    assert out["next", "reward"].squeeze(-1).tolist() == [[3, 30], [2, 60], [4, 40]]
    assert out["next", "obs"].squeeze(-1).tolist() == [[2, 20], [2, 40], [4, 40]]
    assert out["steps_to_next_obs"].tolist() == [[2, 2], [1, 2], [1, 1]]
    batch["next", "state"] = torch.zeros(3, 7)
    with pytest.raises(ShapeError, match=r"'state'.*\[3, 7\], expected \[3, 2\]"):
        MultiStep(1.0, 2)(batch)
    batch["next", "done"] = torch.tensor([False, True, False]).view(3, 1, 1).expand(3, 2, 1)
    out = MultiStep(1.0, 2)(batch)
    assert out["next", "reward"].squeeze(-1).tolist() == [[3, 30], [2, 20], [4, 40]]
    steps = out["steps_to_next_obs"].tolist()
    assert steps == [[2, 2], [1, 1], [1, 1]]  # the shape does not depend on whether the flags agree


def test_a_reward_that_is_nan_reaches_the_windows_that_hold_it_and_no_other():
    batch = rows(4, ends=[1])
    batch["next", "reward"][1] = math.nan
    out = flat(MultiStep(1.0, 2)(batch)["next", "reward"])
    assert [value != value for value in out] == [True, True, False, False]
    assert out[2:] == [2, 1]


FLAGS = torch.zeros(3, 1, dtype=torch.bool)
WRONG_SETTINGS = [(0.0, 1), (1.1, 1), (-1.0, 1), (0.9, 0), (0.9, -2), (0.9, 1.5)]  # discount, steps

test_wrong_settings_and_batches_that_do_not_fit_are_refused = refusals(
    *((ConfigError, "must", partial(MultiStep, *wrong)) for wrong in WRONG_SETTINGS),
    (MissingKeyError, "'next', 'reward'", lambda: MultiStep(0.9, 2)(rows(3).exclude(("next", "reward")))),
    (ShapeError, "time", lambda: MultiStep(0.9, 2)(rows(3)[0])),
    (ShapeError, "one shape", lambda: DensifyReward()(TensorDict(reward=torch.zeros(3), done=FLAGS))),
    (ShapeError, "time_dim", lambda: DensifyReward(time_dim=2)(TensorDict(reward=torch.zeros(3, 1), done=FLAGS))),
)


@st.composite
def streams(draw):
    """done, mask and rewards of [*B, T] rows with trailing reward dimensions."""
    batch = draw(st.sampled_from([[], [1], [3], [2, 2]]))
    steps = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = [*batch, steps]
    done = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    mask = torch.rand(shape, generator=generator) < 0.8 if draw(st.booleans()) else None
    extra = draw(st.sampled_from([[], [1], [2], [2, 3]]))
    reward = torch.randn(*shape, *extra, generator=generator, dtype=torch.float64)
    return done, mask, reward, draw(st.sampled_from([[], [1]]))


@settings(max_examples=60)
@given(case=streams(), gamma=st.sampled_from([1.0, 0.9, 0.5]), steps=st.integers(1, 12))
def test_windows_are_those_of_a_loop_over_single_rows(case, gamma, steps):
    done, mask, reward, trailing = case
    shape = done.shape
    obs = torch.arange(done.numel()).view(shape)
    flags = done.reshape(*shape, *trailing)
    following = TensorDict(done=flags, terminated=flags.clone(), reward=reward, obs=obs, batch_size=shape)
    batch = TensorDict(next=following, batch_size=shape)
    if mask is not None:
        batch["collector", "mask"] = mask
    out = MultiStep(gamma, steps)(batch)

    size = shape[-1]
    view = {
        name: out["next", name].reshape(-1, size, *out["next", name].shape[len(shape) :]) for name in following.keys()
    }
    count = out["steps_to_next_obs"].reshape(-1, size)
    alive = out["nonterminal"].reshape(-1, size)
    mask = torch.ones_like(done) if mask is None else mask
    lines = zip(*(v.reshape(-1, size, *v.shape[len(shape) :]) for v in (done, mask, reward, obs)), strict=True)
    for line, (d, m, r, o) in enumerate(lines):
        for t in range(size):
            last = t
            while last - t + 1 < steps and last + 1 < size and m[t] and not d[last] and m[last + 1]:
                last += 1
            expected = sum(gamma**j * r[t + j] for j in range(last - t + 1))
            torch.testing.assert_close(view["reward"][line, t], expected)
            assert view["obs"][line, t] == o[last]
            assert view["done"][line, t].all() == view["terminated"][line, t].all() == d[last]
            assert count[line, t] == last - t + 1
            assert alive[line, t] == (bool(m[t]) and last > t)


# --- rewards spread over a trajectory ---


@pytest.mark.parametrize("under", ["root", "next"])
def test_spreading_writes_where_it_reads_and_gives_the_batch_back(under):
    """Regression: of steps with "next", which is where their rewards are, it found none."""
    reward, done = torch.tensor([[0.0], [1.0]]), torch.tensor([[False], [True]])
    batch = TensorDict(reward=reward, done=done, batch_size=[2])
    if under == "next":
        batch = TensorDict(done=torch.zeros(2, 1).bool(), next=batch, batch_size=[2])
    assert DensifyReward(reward_key_out="spread")(batch) is batch
    place = batch if under == "root" else batch["next"]
    assert flat(place["reward"]) == [0, 1]
    assert flat(place["spread"]) == [1, 1]
    assert flat(DensifyReward()(batch).get(("next", "reward") if under == "next" else "reward")) == [1, 1]
    assert flat(reward) == [0, 1]  # the tensor that was in it
    with pytest.raises(MissingKeyError, match="'gain' and 'done'"):
        DensifyReward(reward_key="gain")(batch)


def test_the_time_dimension_that_is_given_is_the_one_that_is_used():
    reward = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]])
    batch = TensorDict(reward=reward, done=torch.zeros_like(reward, dtype=torch.bool))
    spread = {dim: DensifyReward(time_dim=dim)(batch.copy())["reward"].tolist() for dim in (1, 2, -1)}
    assert spread == {1: [[[5, 10], [4, 8]]], 2: [[[3, 2], [12, 8]]], -1: [[[3, 2], [12, 8]]]}


@given(case=streams(), discount=st.sampled_from([1.0, 0.9, 0.0]))
def test_spread_rewards_are_those_of_a_backward_loop(case, discount):
    done, _, reward, _ = case
    done = done.reshape(*done.shape, *[1] * (reward.ndim - done.ndim)).expand(reward.shape)
    dim = case[0].ndim - 1
    out = DensifyReward(time_dim=dim, discount=discount)(TensorDict(reward=reward, done=done))["reward"].movedim(dim, 0)
    ahead = torch.zeros_like(out[0])
    for t in reversed(range(out.shape[0])):
        ahead = reward.movedim(dim, 0)[t] + discount * torch.where(done.movedim(dim, 0)[t], 0, ahead)
        torch.testing.assert_close(out[t], ahead)


# --- segments ---
@given(ids=st.lists(st.integers(0, 2), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_segments_are_runs_of_one_id_cut_at_done(ids, seed):
    done = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) < 0.3
    ends = trajectory_ends(ids=torch.tensor(ids), done=done)
    expected, number = [], 0
    for t in range(len(ids)):
        expected.append(number)
        number += int(bool(done[t]) or (t + 1 < len(ids) and ids[t] != ids[t + 1]))
    assert segment_ids(ends).tolist() == expected
    assert steps_left(ends).tolist() == [expected[t:].count(expected[t]) for t in range(len(ids))]


def test_the_cost_of_a_long_window_grows_with_its_logarithm():
    calls = 0

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal calls
            calls += 1
            return function(*args, **(kwargs or {}))

    values, left = torch.ones(1024), steps_left(torch.zeros(1024, dtype=torch.bool))
    with Counted():
        assert sum_ahead(values, left, 1000, 1.0, 0)[0] == 1000
    assert calls < 300  # a loop over the window would take thousands
