"""Passes over rows, and the limits on which rows may be drawn: age in policy versions, number of uses."""

import multiprocessing
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from llmrl.errors import DataError, MissingKeyError
from tests.support.buffers import restore

KINDS = [RandomSampler, SamplerWithoutReplacement]


def build(sampler, capacity: int = 10, batch_size: int = 4, storage=LazyTensorStorage, **arguments) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage(capacity),
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        **arguments,
    )


def versions(*numbers: int) -> TensorDict:
    return TensorDict(policy_version=torch.tensor(numbers), batch_size=[len(numbers)])


def drawn_versions(buffer: ReplayBuffer) -> set[int]:
    """Of 30 batches."""
    return {version for _ in range(30) for version in buffer.sample()["policy_version"].tolist()}


def draw(buffer: ReplayBuffer, count: int, key: str = "row") -> list[int]:
    """Values of ``key`` in batches until there are ``count`` of them."""
    drawn = []
    while len(drawn) < count:
        drawn += buffer.sample()[key].tolist()
    return drawn


# --- passes ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [{}, {"max_age": 3, "max_uses": 2}])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_run_is_resumed_with_the_same_rows(kind, limits, prefetch, by_file, tmp_path):
    first, second = (build(kind(**limits), capacity=40, prefetch=prefetch) for _ in range(2))
    first.extend(TensorDict(row=torch.arange(40), policy_version=torch.arange(40) // 10, batch_size=[40]))
    for _ in range(3):
        first.sample()
    restore(second, first, tmp_path if by_file else None)
    for step in range(12):
        assert first.sample()["row"].tolist() == second.sample()["row"].tolist()
        assert first.sampler.ran_out == second.sampler.ran_out
        if step % 3 == 2:
            for buffer in (first, second):
                fresh = torch.arange(5) + 100 * step
                buffer.extend(TensorDict(row=fresh, policy_version=torch.full((5,), 4), batch_size=[5]))
    first.close()
    second.close()


def _write(buffer: ReplayBuffer, numbers: list[int]) -> None:
    buffer.extend(TensorDict(row=torch.tensor(numbers), batch_size=[len(numbers)]))


@pytest.mark.slow
def test_rows_that_another_process_overwrites_leave_the_pass(tmp_path):
    buffer = build(
        SamplerWithoutReplacement(shuffle=False),
        capacity=6,
        batch_size=2,
        storage=lambda size: LazyMemmapStorage(size, scratch_dir=tmp_path / "rows"),
    )
    _write(buffer, [0, 1, 2, 3, 4])
    assert buffer.sample()["row"].tolist() == [0, 1]
    sampler, buffer._sampler = buffer._sampler, RandomSampler()  # the other process has a sampler of its own
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(buffer, [5, 6, 7, 8]))
    process.start()
    process.join(timeout=120)
    buffer._sampler = sampler
    assert process.exitcode == 0
    assert (buffer[:]["row"].tolist(), buffer.sample()["row"].tolist()) == ([6, 7, 8, 3, 4, 5], [3, 4])
    assert buffer.sample()["row"].tolist() == [6, 7]


# --- age ---
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_old_versions_are_not_drawn(kind):
    buffer = build(kind(max_age=1))
    buffer.extend(versions(0, 3, 1, 2, 3, 0))
    assert buffer.sampler.version is None  # nothing was looked at yet
    assert drawn_versions(buffer) == {2, 3}
    assert buffer.sampler.version == 3  # the newest row
    buffer.sampler.version = 4  # the trainer has gone on
    assert drawn_versions(buffer) == {3}
    buffer.sampler.version = 9
    with pytest.raises(RuntimeError, match=r"6 too old \(max_age=1 at version 9"):
        buffer.sample()
    buffer.extend(versions(9, 8))
    assert drawn_versions(buffer) == {8, 9}


def test_rows_that_get_too_old_leave_the_pass():
    buffer = build(SamplerWithoutReplacement(shuffle=False, max_age=1), batch_size=2)
    buffer.extend(versions(0, 0, 0, 1, 1, 1))
    assert buffer.sample()["policy_version"].tolist() == [0, 0]
    buffer.sampler.version = 2
    assert buffer.sample()["policy_version"].tolist() == [1, 1]
    assert buffer.sample()["policy_version"].tolist() == [1]
    assert buffer.sampler.ran_out


def test_replaced_rows_have_the_version_of_what_they_hold_now():
    buffer = build(RandomSampler(max_age=0))
    buffer.extend(versions(0, 0, 1))
    assert set(buffer.sample()["policy_version"].tolist()) == {1}
    buffer[0] = versions(2)[0]
    assert buffer.sample(return_info=True)[1]["index"].tolist() == [0] * 4


# --- uses ---
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_used_as_often_as_was_asked_for_and_again_once_it_is_overwritten(kind):
    buffer = build(kind(max_uses=3), capacity=5)
    buffer.extend(TensorDict(row=torch.arange(5), batch_size=[5]))
    assert Counter(draw(buffer, 15)) == dict.fromkeys(range(5), 3)
    with pytest.raises(RuntimeError, match=r"5 used up \(max_uses=3\).*write"):
        buffer.sample()
    buffer.extend(TensorDict(row=torch.tensor([7, 8]), batch_size=[2]))
    assert Counter(draw(buffer, 6)) == {7: 3, 8: 3}


def test_each_use_that_is_left_is_as_likely_as_any_other():
    counts = Counter()
    for seed in range(300):
        buffer = build(RandomSampler(max_uses=2), batch_size=1)
        buffer.set_rng(torch.Generator().manual_seed(seed))
        buffer.extend(TensorDict(row=torch.arange(2), batch_size=[2]))
        counts[int(buffer.sample()["row"]), int(buffer.sample()["row"])] += 1
    # The second draw takes one of three uses: two of the other row.
    assert counts[0, 1] + counts[1, 0] == pytest.approx(200, abs=35)
    assert counts[0, 0] == pytest.approx(50, abs=25)


# --- errors ---
@pytest.mark.parametrize("kind", KINDS)
def test_impossible_limits_are_refused(kind):
    with pytest.raises(ValueError, match=r"max_age .*got -1"):
        kind(max_age=-1)
    with pytest.raises(ValueError, match=r"max_uses .*at least 1: got 0"):
        kind(max_uses=0)
    with pytest.raises(RuntimeError, match="this one has none"):
        kind(max_uses=1).version = 3


def test_a_version_is_a_whole_number_in_an_entry():
    buffer = build(RandomSampler(max_age=1, version_key="policy_versoin"))
    buffer.extend(versions(1, 2))
    for _ in range(2):
        with pytest.raises(MissingKeyError, match="Did you mean 'policy_version'"):
            buffer.sample()
    buffer = build(RandomSampler(max_age=1))
    buffer.extend(TensorDict(policy_version=torch.rand(3), batch_size=[3]))
    with pytest.raises(DataError, match="whole numbers"):
        buffer.sample()


def test_versions_that_cannot_be_read_do_not_keep_a_pass_over_other_rows():
    """Regression: once they could be read, the pass went on with positions that the new storage does not have."""
    buffer = build(SamplerWithoutReplacement(shuffle=False, max_age=1, max_uses=9))
    buffer.extend(versions(*[3] * 10))
    buffer.sample()
    for wrong in (torch.rand(10), torch.full((10,), 3)):
        storage = LazyTensorStorage(10)
        storage.set(slice(0, 3), TensorDict(policy_version=wrong[:3], batch_size=[3]))
        buffer.set_storage(storage)
        if wrong.is_floating_point():
            with pytest.raises(DataError, match="whole numbers"):
                buffer.sample()
    assert buffer.sample(return_info=True)[1]["index"].tolist() == [0, 1, 2]


def test_a_pass_with_drop_last_names_how_many_rows_may_be_drawn():
    buffer = build(SamplerWithoutReplacement(drop_last=True, max_age=0), batch_size=3)
    buffer.extend(versions(0, 1, 1))
    with pytest.raises(ValueError, match=r"batch_size=3, 2 rows .* of 3"):
        buffer.sample()
