"""Storages on disk: what comes back, what the files hold, and what damage does."""

import errno
import importlib
import json
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StorageEnsemble,
)
from llmrl.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from llmrl.data.replay_buffers.checkpointers.containers import H5Container
from llmrl.data.replay_buffers.directory import current_directory, replace_directory
from llmrl.data.replay_buffers.storages import LazyMemmapStorage
from llmrl.errors import CheckpointError, UnsupportedError
from tests.support.buffers import assert_same, damage, holding, restore, through_files

COMPACT = [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
ALL = [TensorStorageCheckpointer, *COMPACT]


def rollout(start, steps, envs=None, episode=7):
    """Steps ``start ...`` of an endless run whose episodes have ``episode`` steps; [steps] or [envs, steps]."""
    t = torch.arange(start, start + steps)
    t = t if envs is None else t + 1000 * torch.arange(envs).unsqueeze(-1)
    done = ((t + 1) % episode == 0).unsqueeze(-1)
    following = TensorDict(
        obs=(t + 1).unsqueeze(-1) / 2, reward=(t % 5).float().unsqueeze(-1), done=done, batch_size=t.shape
    )
    following["terminated"], following["truncated"] = done.clone(), torch.zeros_like(done)
    obs = torch.where(t.unsqueeze(-1) % episode == 0, -t.unsqueeze(-1) / 2 - 0.5, t.unsqueeze(-1) / 2)
    out = TensorDict(obs=obs, action=t * 3, next=following, batch_size=t.shape)
    for name in ("done", "terminated", "truncated"):
        out[name] = torch.zeros_like(done)
    return out


def buffer_of(checkpointer, storage=LazyTensorStorage, **kwargs):
    buffer = ReplayBuffer(storage=storage(100, **kwargs), batch_size=8)
    buffer.storage.checkpointer = checkpointer
    return buffer


def manifest_of(path):
    return json.loads((current_directory(path) / "manifest.json").read_text())


def rows_of(*values):
    return TensorDict(obs=torch.tensor(values), batch_size=[len(values)])


# --- what comes back ---


@pytest.mark.parametrize("make", COMPACT)
def test_writes_of_60_and_40_frames_that_do_not_follow_each_other_come_back_unchanged(make, tmp_path):
    buffer, other = buffer_of(make()), buffer_of(make())
    checkpointer = buffer.storage.checkpointer
    buffer.extend(rollout(0, 60, episode=10_000))
    buffer.extend(rollout(500, 40, episode=10_000))
    with pytest.warns(UserWarning, match=r"1 of 2 .*without done"):
        checkpointer.dumps(buffer.storage, tmp_path)
    buffer.empty()
    for start, steps in ((0, 60), (500, 40), (900, 60), (2000, 40)):
        buffer.extend(rollout(start, steps, episode=10_000))
        restore(other.storage, buffer.storage, tmp_path)
        assert (other[:]["next", "obs"] - buffer[:]["next", "obs"]).abs().max() == 0
        assert_same(other[:], buffer[:])
    layout = manifest_of(tmp_path)["layout"]
    assert (layout["trajectories"], layout["ends_without_done"]) == (2, 1)


@pytest.mark.parametrize("make", COMPACT)
def test_rows_that_are_not_steps_are_stored_as_they_are_and_the_manifest_says_why(make, tmp_path):
    storage, other = LazyTensorStorage(10), LazyTensorStorage(10)
    storage.set(slice(0, 3), rows_of(1, 2, 3))
    checkpointer = make()
    with pytest.warns(UserWarning, match="as they are"):
        checkpointer.dumps(storage, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        checkpointer.dumps(storage, tmp_path)
    assert manifest_of(tmp_path)["layout"]["name"] == "rows"
    assert "'next'" in manifest_of(tmp_path)["layout"]["reason"]
    make().loads(other, tmp_path)
    assert other[:]["obs"].tolist() == [1, 2, 3]


def test_a_hook_changes_what_is_written_and_what_is_read(tmp_path):
    buffer, other = holding(rows_of(1, 2)), ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.register_save_hook(lambda td: td.apply_(lambda value: value.mul_(10)))  # into what it gets
    other.register_load_hook(lambda td: td.apply_(lambda value: value.add_(1)))
    restore(other, buffer, tmp_path)
    assert (other["obs"].tolist(), buffer["obs"].tolist()) == ([11, 21], [1, 2])
    other.register_load_hook(lambda td: None)
    with pytest.raises(CheckpointError, match="hook must return"):
        other.loads(tmp_path)


# --- files ---
def _bytes(path):
    return {file.name: file.read_bytes() for file in current_directory(path).iterdir()}


@pytest.mark.parametrize("make", ALL)
def test_a_part_filled_buffer_writes_its_rows_only_and_equal_runs_give_equal_files(make, tmp_path):
    for name in ("first", "second"):
        storage = LazyTensorStorage(100_000)
        storage.set(slice(0, 6), rollout(0, 6))
        make().dumps(storage, tmp_path / name)
    first, second = _bytes(tmp_path / "first"), _bytes(tmp_path / "second")
    assert first == second
    assert sum(map(len, first.values())) < 40_000


def test_h5_files_have_a_group_per_trajectory_and_can_be_compressed(tmp_path):
    h5py = pytest.importorskip("h5py")
    storage = LazyTensorStorage(4000)
    storage.set(slice(0, 4000), rollout(0, 4000, episode=2000).apply(torch.zeros_like))
    sizes = []
    for options in (None, {"compression": "gzip"}):
        H5StorageCheckpointer(checkpoint_file="rows.h5", h5_kwargs=options).dumps(storage, tmp_path)
        sizes.append((current_directory(tmp_path) / "rows.h5").stat().st_size)
    assert sizes[1] < sizes[0] / 3
    with h5py.File(current_directory(tmp_path) / "rows.h5") as file:
        assert file["traj_000/obs"].shape == (4001, 1)
    other = LazyTensorStorage(4000)
    H5StorageCheckpointer().loads(other, tmp_path)
    assert_same(other[:], storage[:])


def test_saving_to_the_storages_own_memory_mapped_directory_keeps_its_files(tmp_path):
    for place in (tmp_path / "own", tmp_path / "buffer"):
        own = place if place.name == "own" else place / "storage"
        buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=own))
        buffer.storage.checkpointer = TensorStorageCheckpointer()
        buffer.extend(rows_of(1, 2, 3))
        files = set(own.iterdir())
        for _ in range(2):
            buffer.dumps(place)
        assert files <= set(own.iterdir())
        buffer.extend(rows_of(4))  # goes to the same files
        other = ReplayBuffer(storage=LazyMemmapStorage(10))
        other.loads(place)
        assert other[:]["obs"].tolist() == [1, 2, 3]
        assert buffer[:]["obs"].tolist() == [1, 2, 3, 4]


def test_a_write_touches_nothing_else_in_the_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "v1").mkdir()
    for number in range(3):
        with replace_directory(tmp_path) as folder:
            (folder / "x").write_text(str(number))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    names = ["checkpoint.3", "checkpoint.current", "notes.txt", "v1"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert (current_directory(tmp_path) / "x").read_text() == "2"


# --- damage ---


def test_an_h5_file_is_not_begun_where_there_is_no_room_for_it(tmp_path):
    pytest.importorskip("h5py")
    larger_than_any_disk = torch.zeros(1).expand(10**15)
    with H5Container.open(tmp_path / "x.h5", "w") as container, pytest.raises(OSError, match=r"No space left.*'a/b'"):
        container.put(["a", "b"], larger_than_any_disk)


@pytest.mark.parametrize("make", ALL)
def test_every_file_that_is_damaged_is_named_and_the_storage_stays(make, tmp_path):
    storage, other = LazyTensorStorage(100), LazyTensorStorage(100)
    storage.set(slice(0, 14), rollout(0, 14))
    other.set(slice(0, 5), rollout(50, 5))
    before, ring = other[:], other.counters.state()
    make().dumps(storage, tmp_path)
    for file in sorted(current_directory(tmp_path).iterdir()):
        for _ in damage(file):
            with pytest.raises(CheckpointError, match=f"{file.name}.*(load an older one|check the path)"):
                make().loads(other, tmp_path)
            assert_same(other[:], before)
            assert other.counters.state() == ring
    make().loads(other, tmp_path)
    assert_same(other[:], storage[:])


def test_what_is_not_a_checkpoint_is_refused_with_what_to_do(tmp_path):
    storage, checkpointer = LazyTensorStorage(5), TensorStorageCheckpointer()
    manifest = tmp_path / "manifest.json"
    for path, content, match in (
        (tmp_path / "missing", None, "none; check the path"),
        (tmp_path, None, r"no manifest\.json; check the path"),
        (tmp_path, {"format": "other", "format_version": 3}, "got other in version 3"),
        (tmp_path, {"format": "llmrl.storage", "format_version": 1}, r"in version 1.*state_dict\(\) there"),
    ):
        if content is not None:
            manifest.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=match):
            checkpointer.loads(storage, path)
    with pytest.raises(CheckpointError, match="is a file"):
        checkpointer.dumps(storage, manifest)
    assert len(storage) == 0


# --- several storages ---
def test_members_of_an_ensemble_are_saved_and_loaded_together_or_not_at_all(tmp_path):
    def members():
        pair = StorageEnsemble(LazyTensorStorage(5), ListStorage(5))
        for storage, make in zip(pair.storages, (TensorStorageCheckpointer, ListStorageCheckpointer), strict=True):
            storage.checkpointer = make()
        return pair

    pair, other, small = members(), members(), members()
    pair.storages[0].set(slice(0, 2), rows_of(1, 2))
    pair.storages[1].set(slice(0, 1), ["a"])
    checkpointer = StorageEnsembleCheckpointer()
    through_files(checkpointer, pair, other, tmp_path)
    assert {"0", "1"} <= {entry.name for entry in current_directory(tmp_path).iterdir()}
    assert (other.storages[0][:]["obs"].tolist(), other.storages[1][:]) == ([1, 2], ["a"])
    small.storages[0].set(slice(0, 1), rows_of(9))
    small.storages[1].max_size = 0
    with pytest.raises(CheckpointError):
        checkpointer.loads(small, tmp_path)
    assert small.storages[0][:]["obs"].tolist() == [9]
    with pytest.raises(CheckpointError, match="as many members: got one of 2, expected 1"):
        checkpointer.loads(StorageEnsemble(LazyTensorStorage(5)), tmp_path)
    with pytest.raises(UnsupportedError, match="own checkpointers"):
        checkpointer.register_save_hook(str)


def test_a_storage_without_a_buffer_is_written_and_read_by_the_default_checkpointer(tmp_path):
    storage, twin = ListStorage(3), ListStorage(3)
    storage.set(range(2), ["a", "b"])
    storage.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin[:] == ["a", "b"]
    # Regression: a program that imported no checkpointer had none: packages load their names when they are first used.
    process = multiprocessing.get_context("fork").Process(target=dump_in_a_new_program, args=(tmp_path,))
    process.start()
    process.join(120)
    twin.loads(tmp_path)
    assert (process.exitcode, twin[:]) == (0, ["c"])


def dump_in_a_new_program(path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "llmrl"]:
        del sys.modules[name]  # as if nothing of it was imported yet
    storage = importlib.import_module("llmrl.data").ListStorage(3)
    storage.set(range(1), ["c"])
    storage.dumps(path)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def forward(self, rows):
        return rows

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        if state["factor"] < 0:
            raise ValueError("a factor must be positive")
        self.factor = state["factor"]


def test_an_ensemble_with_other_transforms_stays_as_it_was(tmp_path):
    def ensemble(row, *factors):
        made = StorageEnsemble(ListStorage(2), ListStorage(2), transforms=[Scale(factor) for factor in factors])
        for storage in made.storages:
            storage.set(slice(0, 1), [row])
        return made

    refused, checkpointer = ensemble("new", 2, -1), StorageEnsembleCheckpointer()
    few = refused.state_dict() | {"transforms": [{"factor": 2}]}
    checkpointer.dumps(refused, tmp_path)
    other = ensemble("old", 3, 4)
    for fault, load in (
        ("with the same transforms", lambda: other.load_state_dict(few)),
        ("must be positive", lambda: other.load_state_dict(refused.state_dict())),
        ("must be positive", lambda: checkpointer.loads(other, tmp_path)),
    ):
        with pytest.raises((CheckpointError, ValueError), match=fault):
            load()
        assert [storage[:] for storage in other.storages] == [["old"], ["old"]]
        assert [transform.factor for transform in other.transforms] == [3, 4]


def test_two_writers_and_two_readers_of_one_path_do_not_disturb_each_other(tmp_path):
    path, stop = tmp_path / "buffer", time.monotonic() + 0.3
    number_of = [ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(4)]
    for number, buffer in enumerate(number_of):
        buffer.extend(torch.full((8,), number))
    number_of[0].dumps(path)

    def write(number):
        while time.monotonic() < stop:
            number_of[number].dumps(path)

    def read(number):
        while time.monotonic() < stop:
            number_of[number].loads(path)
            assert number_of[number][:].tolist() in ([0] * 8, [1] * 8)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, 0), pool.submit(write, 1), pool.submit(read, 2), pool.submit(read, 3)]:
            done.result()
    number_of[1].dumps(path)
    assert sorted(entry.name.split(".")[0] for entry in path.iterdir()) == ["checkpoint", "checkpoint"]


def test_a_disk_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"could not be written: .*Read-only"):
        buffer.dumps(tmp_path)
