"""Slices of every trajectory once per pass, and slices by the priority of their first row."""

from collections import Counter

import pytest
import torch

from llmrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSamplerWithoutReplacement,
)
from tests.support.buffers import holding
from tests.support.buffers import steps as rows


# --- once per pass ---
def test_a_pass_has_one_slice_of_every_trajectory():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
    lengths = [2, 5, 3, 1, 4, 2, 7, 3]  # seven have two rows or more
    buffer.extend(rows([number for number, length in enumerate(lengths) for _ in range(length)]))
    pieces, orders = set(), set()
    for _ in range(40):
        batches = [batch for batch in buffer]
        assert [len(batch) for batch in batches] == [6, 6, 2]
        ids = torch.cat([batch["episode"] for batch in batches]).view(-1, 2)
        assert torch.equal(ids[:, 0], ids[:, 1])
        assert sorted(ids[:, 0].tolist()) == [0, 1, 2, 4, 5, 6, 7]
        orders.add(tuple(ids[:, 0].tolist()))
        pieces |= {tuple(pair) for batch in batches for pair in batch["step"].view(-1, 2).tolist()}
    assert len(orders) > 30
    starts = [0, *range(2, 6), *range(7, 9), *range(11, 14), 15, *range(17, 23), *range(24, 26)]
    assert pieces == {(start, start + 1) for start in starts}


def test_without_shuffling_trajectories_come_in_the_order_of_time():
    sampler = SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", shuffle=False, drop_last=True)
    buffer = holding(rows([5, 5, 3, 3, 8, 8, 1, 1, 2, 2]), LazyTensorStorage(20), sampler=sampler, batch_size=4)
    assert [batch["episode"].tolist() for batch in buffer] == [[5, 5, 3, 3], [8, 8, 1, 1]]


def test_trajectories_that_are_overwritten_leave_the_pass_and_new_ones_join_the_next():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False, truncated_key=None)
    buffer = holding(rows([0, 0, 0, 1, 1, 1, 2, 2, 2]), LazyTensorStorage(9), sampler=sampler, batch_size=2)
    assert buffer.sample()["episode"].tolist() == [0, 0]
    buffer.extend(rows([3, 3, 3, 3, 3]))  # over all of 0 and two rows of 1, which has one left: too short
    for drawn, ends in ((2, True), (2, False), (3, True)):
        assert buffer.sample()["episode"].tolist() == [drawn, drawn]
        assert sampler.ran_out == ends


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_pass_is_resumed_in_its_middle(prefetch):
    def build() -> ReplayBuffer:
        sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        return ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=4, prefetch=prefetch)

    first, second = build(), build()
    first.extend(rows([time // 4 for time in range(40)]))
    for _ in range(2):
        first.sample()
    second.load_state_dict(first.state_dict())
    for _ in range(8):
        assert first.sample()["step"].tolist() == second.sample()["step"].tolist()
        assert first.sampler.ran_out == second.sampler.ran_out
    first.close()
    second.close()


# --- by priority ---
def prioritized(**arguments) -> ReplayBuffer:
    arguments = {"slice_len": 3, "traj_key": "episode", "truncated_key": None} | arguments
    return ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSliceSampler(10, alpha=1.0, beta=1.0, eps=0.0, **arguments),
        batch_size=3000,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("rare", [False, True])
def test_starts_are_drawn_by_priority_among_the_rows_that_can_be_one(rare):
    buffer = prioritized()
    buffer.extend(rows([0] * 5 + [1] * 5))
    priority = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 0.0, 4.0, 2.0, 5.0, 5.0])
    if rare:  # nearly all of the mass is where no slice begins
        priority[[3, 4, 8, 9]] = 1e9
    buffer.update_priority(torch.arange(10), priority)
    batch, info = buffer.sample(return_info=True)
    steps = batch["step"].view(-1, 3)
    assert torch.equal(steps, steps[:, :1] + torch.arange(3))
    starts = torch.bincount(steps[:, 0], minlength=10)
    legal = [0, 1, 2, 6, 7]
    assert starts.sum() == starts[legal].sum() == 1000
    expected = priority[legal] / priority[legal].sum() * 1000
    assert ((starts[legal] - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom: 0.1 %
    weights = info["priority_weight"].view(-1, 3)
    assert torch.allclose(weights, (1 / priority[steps[:, :1]]).expand(-1, 3))


def test_a_short_trajectory_comes_whole_by_the_priority_of_its_first_row():
    buffer = prioritized(strict_length=False)
    buffer.extend(rows([0] * 2 + [1] * 4))
    buffer.update_priority(torch.arange(6), torch.tensor([3.0, 9.0, 1.0, 1.0, 9.0, 9.0]))
    batch, info = buffer.sample(return_info=True)
    drawn, piece = Counter(), []
    for step, end in zip(batch["step"].tolist(), info["slice_end"].tolist(), strict=True):
        piece.append(step)
        if end:
            drawn[tuple(piece)] += 1
            piece = []
    assert set(drawn) == {(0, 1), (2, 3, 4), (3, 4, 5)}
    assert drawn[0, 1] / drawn.total() == pytest.approx(0.6, abs=0.05)


def test_prioritized_slices_may_end_after_their_trajectory_but_not_begin_before_it():
    with pytest.warns(UserWarning, match="left side"):
        both_sides = prioritized(span=True)
    whole = {(0, 1, 2), (1, 2, 3)}
    for buffer, cut in ((both_sides, {(2, 3), (3,)}), (prioritized(span=(False, 1)), {(2, 3)})):
        buffer.extend(rows([0] * 4))
        seen = {tuple(buffer.sampler.sample(buffer.storage, 3)[0].tolist()) for _ in range(200)}
        assert seen == whole | cut
