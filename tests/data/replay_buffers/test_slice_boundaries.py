"""Where trajectories of slices begin and end: what is read, what is marked, and what outlives a restart."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.buffers import holding
from tests.support.buffers import steps as rows


# --- marks ---
def stored(count: int) -> TensorDict:
    flags = torch.zeros(count, 1, dtype=torch.bool)
    done = flags.clone()
    done[4] = done[-1] = True
    return TensorDict(
        step=torch.arange(count),
        next=TensorDict(done=done, terminated=done.clone(), truncated=flags, batch_size=[count]),
        batch_size=[count],
    )


def test_the_end_of_every_slice_is_marked_in_the_form_of_the_stored_flags():
    buffer = holding(stored(10), kind=TensorDictReplayBuffer, sampler=SliceSampler(slice_len=3), batch_size=6)
    for _ in range(20):
        batch = buffer.sample()
        ends = torch.tensor([[False], [False], [True]] * 2)
        assert torch.equal(batch["next", "truncated"], ends)
        assert torch.equal(batch["next", "done"], ends)
        assert torch.equal(batch["next", "terminated"], (batch["step"] % 5 == 4).unsqueeze(1))
        assert torch.equal(batch["slice_end"], ends.squeeze(1))
        assert batch["index"].shape == (6,)  # as with any other sampler
    assert not buffer[:]["next", "truncated"].any()


def test_transforms_of_a_plain_buffer_see_where_slices_end():
    """Two slices of one unfinished trajectory lie back to back: nothing else in the rows tells them apart."""
    seen = []

    def look(batch: TensorDict) -> TensorDict:
        seen.append(batch["slice_end"].tolist())
        return batch

    sampler = SliceSampler(slice_len=4, traj_key="episode", truncated_key=None)
    buffer = holding(rows([0] * 4), LazyTensorStorage(8), sampler=sampler, batch_size=8, transform=look)
    assert buffer.sample()["step"].tolist() == [0, 1, 2, 3] * 2
    assert seen == [([False] * 3 + [True]) * 2]
    assert "slice_end" not in buffer.storage[:].keys()


def test_without_a_key_for_truncation_the_flags_are_as_stored():
    sampler = SliceSampler(slice_len=2, truncated_key=None)
    buffer = holding(stored(10), kind=TensorDictReplayBuffer, sampler=sampler, batch_size=6)
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", "slice_end"}
    assert torch.equal(batch["next", "done"], (batch["step"] % 5 == 4).unsqueeze(1))


def test_rows_that_store_no_flags_get_them():
    sampler = SliceSampler(slice_len=2, traj_key="episode", truncated_key=("a", "truncated"))
    buffer = holding(rows([0] * 5), kind=TensorDictReplayBuffer, sampler=sampler, batch_size=4)
    batch = buffer.sample()
    assert batch["a", "truncated"].tolist() == batch["a", "done"].tolist() == [[False], [True]] * 2
    assert not batch["a", "terminated"].any()


# --- where boundaries come from ---
def same_draws(buffers: list[ReplayBuffer]) -> bool:
    for buffer in buffers:
        buffer.set_rng(torch.Generator().manual_seed(3))
    drawn = [[buffer.sample()["step"].tolist() for _ in range(10)] for buffer in buffers]
    return all(steps == drawn[0] for steps in drawn)


def test_ids_ends_and_keys_name_the_same_trajectories():
    ids = [4, 4, 4, 4, 7, 7, 7, 4, 4, 4]
    ends = torch.tensor([False] * 3 + [True] + [False] * 2 + [True] + [False] * 3)
    data = rows(ids, collector=TensorDict(traj_ids=torch.tensor(ids)), next=TensorDict(done=ends.unsqueeze(1)))
    samplers = [
        SliceSampler(slice_len=3, traj_key="episode"),
        SliceSampler(slice_len=3, trajectory_key="episode"),
        SliceSampler(slice_len=3, end_key=("next", "done")),
        SliceSampler(slice_len=3, ends=ends, cache_values=True),
        SliceSampler(slice_len=3, trajectories=torch.tensor(ids), cache_values=True),
        SliceSampler(num_slices=2, traj_key=("collector", "traj_ids"), cache_values=True, compile=True, use_gpu=True),
        SliceSampler(num_slices=2),
    ]
    buffers = [ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6) for sampler in samplers]
    for buffer in buffers:
        buffer.extend(data)
    assert same_draws(buffers)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_lists_of_rows_have_slices_too(storage):
    buffers = []
    for make in (LazyTensorStorage, storage):
        buffers.append(ReplayBuffer(storage=make(20), sampler=SliceSampler(slice_len=2), batch_size=4))
        buffers[-1].extend(stored(10))
    assert same_draws(buffers)


def test_unbounded_storages_have_slices():
    buffer = ReplayBuffer(
        storage=ListStorage(None), sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=2
    )
    for number in range(5):
        buffer.extend(rows([number] * 3))
    assert len({tuple(buffer.sample()["episode"].tolist()) for _ in range(100)}) == 5


def test_a_filled_buffer_takes_another_sampler_and_an_emptied_one_starts_again(ring_of_eight):
    buffer = ring_of_eight
    buffer.set_sampler(SliceSampler(slice_len=3, traj_key="t"))
    buffer.sample()
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()
    buffer.extend(TensorDict(t=torch.zeros(3, dtype=torch.int64), s=torch.arange(20, 23), batch_size=[3]))
    assert buffer.sample()["s"].tolist() == [20, 21, 22]


def test_a_pickled_sampler_reads_the_storage_anew(ring_of_eight):
    buffer = ring_of_eight
    buffer.set_sampler(SliceSampler(slice_len=3, traj_key="t"))
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.sample()
    sampler = buffer.sampler
    copy = pickle.loads(pickle.dumps(sampler))
    for one in (sampler, copy):
        one.set_rng(torch.Generator().manual_seed(5))
    assert torch.equal(copy.sample(buffer.storage, 9)[0], sampler.sample(buffer.storage, 9)[0])
