from __future__ import annotations

import pytest
import torch

from llmrl.data.replay_buffers import ListStorage, RandomSampler, SamplerWithoutReplacement


def filled(count: int) -> ListStorage:
    storage = ListStorage(100)
    storage.set(slice(0, count), list(range(count)))
    return storage


def test_uniform_draws_reach_every_row_about_equally_often():
    sampler = RandomSampler()
    sampler.set_rng(torch.Generator().manual_seed(0))
    index, info = sampler.sample(filled(8), 8000)
    assert index.dtype == torch.int64
    assert info == {}
    assert (torch.bincount(index, minlength=8) - 1000).abs().max() < 150
    assert not sampler.ran_out


def test_without_shuffling_a_pass_is_the_order_of_positions():
    sampler = SamplerWithoutReplacement(shuffle=False)
    storage = filled(5)
    draws = [sampler.sample(storage, 2)[0].tolist() for _ in range(4)]
    assert draws == [[0, 1], [2, 3], [4], [0, 1]]


def test_rows_written_during_a_pass_join_the_next_one():
    sampler = SamplerWithoutReplacement(shuffle=False)
    storage = filled(5)
    assert sampler.sample(storage, 2)[0].tolist() == [0, 1]
    storage.set(slice(5, 7), [5, 6])
    sampler.extend(torch.tensor([5, 6]))
    storage.set(0, "drawn already")
    sampler.add(0)
    storage.set(3, "not drawn yet")
    sampler.add(3)
    assert sampler.sample(storage, 2)[0].tolist() == [2, 4]
    assert sampler.ran_out
    assert sampler.sample(storage, 9)[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_pass_whose_rows_were_all_overwritten_has_ended():
    sampler = SamplerWithoutReplacement(shuffle=False)
    storage = filled(3)
    sampler.sample(storage, 2)
    assert not sampler.ran_out
    sampler.extend(torch.tensor([2]))
    assert sampler.ran_out


def test_a_batch_larger_than_the_content():
    assert SamplerWithoutReplacement().sample(filled(3), 5)[0].numel() == 3
    with pytest.raises(ValueError, match="batch_size=5, 3 rows"):
        SamplerWithoutReplacement(drop_last=True).sample(filled(3), 5)


def test_the_middle_of_a_pass_is_part_of_the_state():
    sampler, other = SamplerWithoutReplacement(), SamplerWithoutReplacement()
    storage = filled(10)
    first = sampler.sample(storage, 4)[0]
    other.load_state_dict(sampler.state_dict())
    rest = [sampler.sample(storage, 4)[0] for _ in range(4)]
    assert all(torch.equal(other.sample(storage, 4)[0], index) for index in rest)
    assert sorted(first.tolist() + rest[0].tolist() + rest[1].tolist()) == list(range(10))
