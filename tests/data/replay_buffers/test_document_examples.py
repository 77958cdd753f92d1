"""The examples of the documentation on buffers, storages, samplers, checkpoints, TED and ensembles, as they can run.

Where an example has a slip (a misspelt name, an argument that is missing) it is repaired; where what it literally says
works too, that is tested beside it. Environments are replaced by recorded rollouts of the same shape. Sharing between
processes is in ``test_sharing``.
"""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from llmrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler


class Recorded:
    """One environment with the entries of a cart and pole, whose episodes go on from batch to batch."""

    def __init__(self, seed: int, ids: Iterator[int]) -> None:
        self.generator, self.ids = torch.Generator().manual_seed(seed), ids
        self._reset()

    def _reset(self) -> None:
        self.left = int(torch.randint(8, 30, (), generator=self.generator))
        self.steps, self.trajectory = 0, next(self.ids)
        self.observation = torch.randn(4, generator=self.generator)

    def step(self) -> TensorDict:
        self.left, self.steps, before = self.left - 1, self.steps + 1, self.observation
        self.observation = torch.randn(4, generator=self.generator)
        done, flag = torch.tensor([self.left == 0]), torch.tensor([False])
        steps, flags = torch.tensor([self.steps]), {"done": done, "terminated": done, "truncated": flag}
        out = TensorDict(
            observation=before,
            action=torch.randint(2, (2,), generator=self.generator),
            step_count=steps - 1,
            collector=TensorDict(traj_ids=torch.tensor(self.trajectory)),
            next=TensorDict(observation=self.observation, step_count=steps, reward=torch.ones(1), **flags),
            **dict.fromkeys(flags, flag),
        )
        if self.left == 0:
            self._reset()
        return out


def collector(frames_per_batch: int, total_frames: int = -1, num_envs: int | None = None) -> Iterator[TensorDict]:
    """Batches [T], or [num_envs, T], as a collector gives them, with time as the last dimension."""
    ids = itertools.count()
    envs = [Recorded(seed, ids) for seed in range(num_envs or 1)]
    steps = math.ceil(frames_per_batch / len(envs))
    for _ in itertools.count() if total_frames < 0 else range(math.ceil(total_frames / frames_per_batch)):
        batch = torch.stack([torch.stack([env.step() for _ in range(steps)]) for env in envs])
        batch.names = [None, "time"]
        yield batch[0] if num_envs is None else batch


# --- sampling and indexing ---
def test_rows_are_indexed_sampled_and_iterated_over():
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    rb_td.add(TensorDict({"img": img, "labels": torch.randint(100, ())}, batch_size=[]))
    first_elt = rb_td[0]
    assert first_elt.batch_size == ()
    storage = rb_td[:]
    assert storage.batch_size == (1,)
    with pytest.warns(UserWarning, match="overrules the batch_size=1"):
        sample = rb_td.sample(128)
    assert sample["img"].shape == (128, 3, 64, 64)
    endless = [data["labels"] for data in itertools.islice(rb_td, 1000)]  # a RandomSampler has no passes
    assert set(torch.cat(endless).tolist()) == {int(first_elt["labels"])}
    assert len(list(rb_td.epoch())) == 1


# --- trajectories ---
def check_slices(sample: TensorDict, num_slices: int) -> None:
    """Runs of consecutive steps of one trajectory; short ones come whole."""
    ends = sample["slice_end"].nonzero().flatten().tolist()
    assert len(ends) == num_slices
    for first, last in zip([0, *[end + 1 for end in ends[:-1]]], ends, strict=True):
        piece = sample[first : last + 1]
        assert len(piece["collector", "traj_ids"].unique()) == 1
        assert bool((piece["step_count"].flatten().diff() == 1).all())
        assert torch.equal(piece["next", "observation"][:-1], piece["observation"][1:])


@pytest.mark.parametrize(("ndim", "envs"), [(1, ()), (2, (4,)), (3, (4, 2))])
def test_buffers_take_the_batches_of_collectors_of_any_shape(ndim, envs):
    frames = 64
    memory = ReplayBuffer(
        storage=LazyTensorStorage(frames, ndim=ndim),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids"), strict_length=False),
        batch_size=16,
    )
    batches = collector(frames, num_envs=math.prod(envs) if envs else None)
    for data in itertools.islice(batches, 3):
        memory.extend(data.reshape(*envs, -1) if len(envs) > 1 else data)
    assert memory[:].shape == (*envs, frames // math.prod(envs))
    check_slices(memory.sample(), 4)


def test_batches_are_flattened_where_they_are_written():
    """A function that is given as transform runs on reads, so the flattening is a write_transform."""
    memory = ReplayBuffer(storage=LazyTensorStorage(50), write_transform=lambda data: data.reshape(-1))
    for data in itertools.islice(collector(12, num_envs=3), 4):
        memory.extend(data)
    assert (len(memory), len(memory.sample(5))) == (48, 5)
    literal = ReplayBuffer(storage=LazyTensorStorage(50), transform=lambda data: data.reshape(-1))
    literal.extend(data)
    assert len(literal) == 3
    assert len(literal.sample(5)) == 20  # five rows of four steps
