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
from torch.nn.functional import interpolate

from llmrl.data import (
    Flat2TED,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TED2Flat,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.directory import current_directory
from llmrl.envs import Compose, Transform
from llmrl.envs.transforms import NextStateReconstructor, RandomCropTensorDict


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


def rollout(steps: int) -> TensorDict:
    return next(collector(steps))


# --- storages ---
def test_a_list_holds_objects_of_any_kind():
    rb = ReplayBuffer(storage=ListStorage(10))
    assert (rb.add("a string!"), rb.extend([30, None]).tolist()) == (0, [1, 2])
    assert rb[:] == ["a string!", 30, None]


def test_a_tensor_storage_is_given_its_container():
    container = torch.zeros(10, 3, 64, 64, dtype=torch.uint8)
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    rb = ReplayBuffer(storage=TensorStorage(container))
    assert rb.add(img) == 0
    assert len(rb) == 10  # the container's rows count as written
    assert torch.equal(rb[0], img)
    rb = ReplayBuffer(storage=TensorStorage(container, filled=False))
    rb.add(img)
    assert len(rb) == 1


def memmapped() -> ReplayBuffer:
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    rb_td.add(TensorDict({"img": img, "labels": torch.randint(100, ())}, batch_size=[]))
    return rb_td


def test_tensordicts_and_trees_go_into_memory_mapped_files():
    assert memmapped()[0]["img"].dtype is torch.uint8
    rb_pytree = ReplayBuffer(storage=LazyMemmapStorage(10))
    rb_pytree.extend({"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}})
    assert len(rb_pytree) == 3
    assert rb_pytree[1]["a"]["c"][1][0].tolist() == [1.0] * 10


def test_a_tuple_is_a_tree_and_a_list_holds_rows():
    tree = ReplayBuffer(storage=LazyTensorStorage(10))
    tree.extend((torch.arange(3), torch.zeros(3, 2)))
    assert len(tree) == 3
    rows = ReplayBuffer(storage=LazyTensorStorage(10))
    rows.extend([torch.zeros(2), torch.ones(2)])
    assert rows[:].tolist() == [[0, 0], [1, 1]]


# --- sampling and indexing ---
def test_rows_are_indexed_sampled_and_iterated_over():
    rb_td = memmapped()
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


def test_a_sampler_without_replacement_iterates_over_the_rows_once():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=3)
    rb.extend(torch.arange(10))
    batches = list(rb)
    assert [len(data) for data in batches] == [3, 3, 3]
    assert len(set(torch.cat(batches).tolist())) == 9


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


def sliced(ndim: int) -> ReplayBuffer:
    sampler = SliceSampler(num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False)
    return ReplayBuffer(storage=LazyTensorStorage(100, ndim=ndim), sampler=sampler, batch_size=64)


def test_slices_of_one_environment():
    rb = sliced(ndim=1)
    for data in itertools.islice(collector(10), 11):
        rb.extend(data)
    assert (len(rb), rb[:]["next", "step_count"].shape) == (100, (100, 1))
    for _ in range(20):
        check_slices(rb.sample(), 8)


def test_slices_of_two_environments():
    rb = sliced(ndim=2)
    for data in itertools.islice(collector(1, num_envs=2), 101):
        rb.extend(data)
    assert len(rb) == 100
    assert rb[:]["next", "step_count"].squeeze().shape == (2, 50)  # [E, T] like the batches
    assert rb.storage[:]["next", "step_count"].squeeze().shape == (50, 2)  # [T, E], as it is printed there
    for _ in range(20):
        check_slices(rb.sample(), 8)


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


def test_random_windows_of_trajectories():
    obs = torch.randn(100, 50, 1)

    def sample_of(batch_size: list[int]) -> TensorDict:
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000))
        rb.extend(TensorDict({"obs": obs[:-1], "next": {"obs": obs[1:]}}, batch_size))
        rb.append_transform(RandomCropTensorDict(sub_seq_len=10))
        return rb.sample(128)

    sample = sample_of([99, 50])  # as it is meant: each of 99 rows is a trajectory of 50 steps
    assert (sample["obs"].shape, sample["index"].shape) == ((128, 10, 1), (128, 10))
    begin = (obs[sample["index"][:, 0]] == sample["obs"][:, :1]).squeeze(-1).int().argmax(1)
    for row, start, index in zip(sample["obs"], begin.tolist(), sample["index"][:, 0].tolist(), strict=True):
        assert torch.equal(row, obs[index, start : start + 10])
    sample = sample_of([99])  # as it is written: the window is one of the 128 rows; this is what is printed there
    assert sample.batch_size == sample["index"].shape == (10,)
    assert sample["obs"].shape == sample["next", "obs"].shape == (10, 50, 1)
    assert torch.equal(sample["obs"], obs[sample["index"]])


# --- checkpoints ---
def test_a_buffer_is_saved_and_loaded_after_every_batch(tmp_path):
    pytest.importorskip("h5py")
    rb, rb_test = (ReplayBuffer(storage=LazyMemmapStorage(100, ndim=2)) for _ in range(2))
    for each in (rb, rb_test):
        each.storage.checkpointer = H5StorageCheckpointer()
    for data in collector(22, total_frames=132, num_envs=3):
        rb.extend(data)
        assert rb._storage.max_size == 102
        rb.dumps(tmp_path)
        rb_test.loads(tmp_path)
        assert (rb_test[:] == rb[:]).all()
        assert rb_test.writer.cursor == rb.writer.cursor


def test_flattening_hooks_store_each_observation_once(tmp_path):
    plain, flat = (ReplayBuffer(storage=LazyMemmapStorage(300)) for _ in range(2))
    flat.register_save_hook(TED2Flat())
    flat.register_load_hook(Flat2TED())
    data = next(batch for batch in collector(200))
    for rb, name in ((plain, "plain"), (flat, "flat")):
        rb.extend(data)
        rb.dumps(tmp_path / name)
        other = ReplayBuffer(storage=LazyMemmapStorage(300))
        if name == "flat":
            other.register_load_hook(Flat2TED())
        other.loads(tmp_path / name)
        assert (other[:] == rb[:]).all()
    sizes = [
        sum(file.stat().st_size for file in (current_directory(tmp_path / name) / "storage").rglob("*observation*"))
        for name in ("plain", "flat")
    ]
    ends = 1 + int(data[:-1]["next", "done"].sum())  # the last trajectory does not end in done
    assert sizes == [2 * 200 * 16, (200 + ends) * 16]


def test_a_state_dict_goes_through_torch_save(tmp_path):
    rb = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    rb.extend(rollout(6))
    rb.sample()
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    other = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert (rb.sample() == other.sample()).all()


# --- TED ---
def test_a_rollout_has_time_last_and_what_comes_after_under_next():
    data = rollout(10)
    assert (data.shape[-1], data.names[-1]) == (10, "time")
    going_on = ~data[..., :-1]["next", "done"].squeeze(-1)
    assert (data[..., 1:]["observation"] == data[..., :-1]["next", "observation"])[going_on].all()
    for key in ("reward", "done", "terminated", "truncated"):
        assert data["next", key].shape == (10, 1)
    state_value = torch.zeros(10, 1)
    assert (state_value + data["next", "reward"]).shape == (10, 1)


def test_the_next_observation_is_n_steps_ahead_after_multi_step():
    data = next(batch for batch in collector(40))
    ahead = MultiStep(gamma=0.9, n_steps=3)(data)
    same = (ahead[1:]["observation"] == ahead[:-1]["next", "observation"]).all(-1)
    assert not same.all()
    for step in range(40):
        span = int(ahead["steps_to_next_obs"][step])
        assert torch.equal(ahead["next", "observation"][step], data["next", "observation"][step + span - 1])


# --- next observations ---
def test_next_observations_are_rebuilt_when_rows_are_sampled():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=8,
    )
    data = TensorDict(
        {
            "observation": torch.arange(8, dtype=torch.float32).view(8, 1),
            ("next", "reward"): torch.zeros(8, 1),
            ("next", "done"): torch.tensor([[False]] * 7 + [[True]]),
            ("collector", "traj_ids"): torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        },
        batch_size=[8],
    )
    rb.extend(data)
    nan = float("nan")
    for _ in range(20):
        sample = rb.sample()
        for half in (sample[:4], sample[4:]):  # also where both are slices of the same, unfinished trajectory
            first = float(half["observation"][0])
            expected = torch.tensor([first + 1, first + 2, first + 3, nan])
            torch.testing.assert_close(half["next", "observation"].flatten(), expected, equal_nan=True)


def test_a_transform_measures_what_it_is_given():
    class TransformThatMeasuresBytes(Transform):
        """Measures the number of bytes in the tensordict, and writes it under `"bytes"`."""

        def __init__(self):
            super().__init__(in_keys=[], out_keys=["bytes"])

        def forward(self, tensordict):
            tensordict["bytes"] = torch.full(tensordict.batch_size, tensordict.bytes())
            return tensordict

    assert TransformThatMeasuresBytes()(TensorDict(a=torch.zeros(3)))["bytes"] == 12
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=TransformThatMeasuresBytes())
    rb.extend(TensorDict(a=torch.zeros(4), batch_size=[4]))
    assert rb.sample(2)["bytes"].tolist() == [8, 8]


# --- ensembles ---
class ToTensorImage(Transform):
    def _apply_transform(self, pixels):
        return pixels.movedim(-1, -3).float() / 255


class Resize(Transform):
    def __init__(self, size, in_keys, out_keys=None):
        super().__init__(in_keys, out_keys)
        self.size = size

    def _apply_transform(self, pixels):
        images = pixels.flatten(0, -4) if pixels.ndim > 4 else pixels
        return interpolate(images, (self.size, self.size)).reshape(*pixels.shape[:-2], self.size, self.size)


class RenameTransform(Transform):
    def forward(self, td):
        for old, new in zip(self.in_keys, self.out_keys, strict=True):
            td = td.rename_key_(old, new)
        return td


def stack_alike(parts):
    return torch.stack([part.exclude("some") for part in parts])  # which is left behind, empty, by the renaming


@pytest.mark.parametrize("collate_fn", [None, stack_alike])
def test_an_ensemble_of_data_sets_whose_entries_differ_in_name_and_size(collate_fn):
    def images_with(key):
        pixels = ["pixels", ("next", "pixels")]
        transform = Compose(ToTensorImage(pixels), Resize(32, pixels), RenameTransform([key], ["renamed"]))
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(10), transform=transform)

    def images(size, key):
        pixels = {name: torch.randint(255, (10, size, size, 3)) for name in ("pixels", ("next", "pixels"))}
        return TensorDict({**pixels, key: torch.randn(10)}, batch_size=[10])

    rb = ReplayBufferEnsemble(
        images_with(("some", "key")),
        images_with("another_key"),
        p=[0.5, 0.5],
        transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"]),
        collate_fn=collate_fn,
    )
    rb[0].extend(images(244, ("some", "key")))
    rb[1].extend(images(64, "another_key"))
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == torch.Size([2, 5])
