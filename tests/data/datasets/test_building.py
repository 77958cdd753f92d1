"""Datasets as buffers: built once and whole, opened again, preprocessed, split, deleted, refused."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import multiprocessing as mp

from llmrl.data import (
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictRoundRobinWriter,
)
from llmrl.data.datasets import (
    BaseDatasetExperienceReplay,
    D4RLExperienceReplay,
    RobosetExperienceReplay,
)
from llmrl.data.datasets.formats import following, ted_rows
from llmrl.data.datasets.rows import MARKER
from llmrl.data.replay_buffers.directory import current_directory
from llmrl.envs.transforms import ExcludeTransform, RenameTransform
from llmrl.errors import ConfigError, DataError
from tests.support import public_formats as formats

KITCHEN = "kitchen-complete-v0"


@pytest.fixture
def kitchen(tmp_path) -> dict:
    """Where the raw file of a small dataset lies: trajectories of 3, 5 and 2 steps."""
    folder = tmp_path / "root" / KITCHEN
    folder.mkdir(parents=True)
    formats.write_d4rl(folder / "kitchen.hdf5", {"terminals": [2, 9], "timeouts": [7]})
    return {"root": tmp_path / "root", "download": False}


# --- the documented examples ---
def test_the_example_of_whole_trajectories(kitchen):
    dataset = D4RLExperienceReplay(KITCHEN, split_trajs=True, batch_size=10, **kitchen)
    sample = dataset.sample()
    assert sample.batch_size == (10, 5)
    expected = {"action", "done", "index", "infos", "mask", "next", "observation", "timeouts", "traj_ids"}
    assert set(sample.keys()) >= expected
    assert sample["mask"].sum(1).tolist() == [[3, 5, 2][number] for number in sample["traj_ids"][:, 0].tolist()]
    assert not sample["observation"][~sample["mask"]].any()
    dataset.append_transform(RenameTransform(["done", ("next", "done")], ["terminal", ("next", "terminal")]))
    renamed = dataset.sample()
    assert "terminal" in renamed.keys()
    assert ("next", "terminal") in renamed.keys(True)
    assert "done" not in renamed.keys()
    sampler = SamplerWithoutReplacement(drop_last=True)
    dataset = D4RLExperienceReplay(KITCHEN, sampler=sampler, split_trajs=True, batch_size=3, **kitchen)
    assert [sorted(data["traj_ids"][:, 0].tolist()) for data in dataset] == [[0, 1, 2]]


def norm_of(data):
    return data.set("obs_norm", data.get("observation").norm(dim=-1))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "mp_start_method": "fork"}, {"chunksize": 0}])
def test_the_example_of_preprocessing(tmp_path, workers):
    name, arguments = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4", {"root": tmp_path / "root", "batch_size": 32}
    formats.write_roboset(tmp_path / "seed.h5", [3, 4])
    dataset = RobosetExperienceReplay(name, source=tmp_path / "seed.h5", download="force", **arguments)
    dataset.preprocess(norm_of, **workers or {"num_chunks": 3})
    sample = dataset.sample()
    assert torch.equal(sample["obs_norm"], sample["observation"].abs().squeeze(-1))
    again = RobosetExperienceReplay(name, **arguments)
    assert torch.equal(again[:]["obs_norm"], dataset[:]["obs_norm"])
    assert again[:]["observation"].flatten().tolist() == [0, 1, 2, 100, 101, 102, 103]
    anew = RobosetExperienceReplay(name, source=tmp_path / "seed.h5", download="force", **arguments)
    assert "obs_norm" not in anew.sample().keys()
    with pytest.raises(DataError, match="one row per row"):
        anew.preprocess(lambda rows: rows[:1])


# --- the buffer ---
def test_arguments_of_the_buffer_reach_it_and_it_may_be_part_of_an_ensemble(kitchen):
    parts = [D4RLExperienceReplay(KITCHEN, **kitchen) for _ in range(2)]
    assert ReplayBufferEnsemble(*parts, batch_size=8, sample_from_all=True).sample().batch_size == (2, 4)
    parts = {"sampler": RandomSampler(), "transform": ExcludeTransform("infos"), "collate_fn": lambda rows: rows}
    dataset = D4RLExperienceReplay(KITCHEN, 4, prefetch=2, **parts, **kitchen)
    sample = dataset.sample()
    assert "infos" not in sample.keys()
    assert len(sample) == 4
    dataset.close()
    slices = D4RLExperienceReplay(KITCHEN, 4, sampler=SliceSampler(slice_len=2), **kitchen)
    for _ in range(10):
        steps = slices.sample()["action"].view(2, 2)
        assert (steps.diff(dim=1) == 10).all()
    with pytest.raises(TypeError, match="Did you mean 'sampler'"):
        D4RLExperienceReplay(KITCHEN, 4, samplers=None, **kitchen)


def test_a_dataset_is_not_written_to_and_never_reaches_the_files(kitchen):
    dataset = D4RLExperienceReplay(KITCHEN, 4, **kitchen)
    row = dataset[0]
    for write in (lambda: dataset.add(row), lambda: dataset.extend(dataset[:2]), lambda: dataset.__setitem__(0, row)):
        with pytest.raises(RuntimeError, match="not written"):
            write()
    with pytest.raises(RuntimeError, match="not written"):
        dataset.empty()
    open_to_writes = D4RLExperienceReplay(KITCHEN, 4, writer=TensorDictRoundRobinWriter(), **kitchen)
    open_to_writes[0] = open_to_writes[1]
    assert open_to_writes[0]["action"].tolist() == [10]
    assert D4RLExperienceReplay(KITCHEN, 4, **kitchen)[0]["action"].tolist() == [0]
    # Rows are mapped and not read:
    columns = {column.data_ptr() for column in dataset.storage._columns}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(dataset.data_path) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert all(any(start <= pointer < stop for start, stop in spans) for pointer in columns)


# --- opening again ---
def test_other_options_or_files_are_refused_until_it_is_built_again(kitchen, tmp_path):
    dataset = D4RLExperienceReplay(KITCHEN, **kitchen)
    notes = json.loads((current_directory(dataset.data_path) / MARKER).read_text())["notes"]
    assert [(source["name"], len(source["sha256"])) for source in notes["sources"]] == [("kitchen.hdf5", 64)]
    with pytest.raises(ConfigError, match=r"drop_timeouts.*download='force'"):
        D4RLExperienceReplay(KITCHEN, terminate_on_end=False, **kitchen)
    formats.write_d4rl(tmp_path / "kitchen.hdf5", {"terminals": [19]}, count=20)
    with pytest.raises(ConfigError, match=r"whose files differ"):
        D4RLExperienceReplay(KITCHEN, source=tmp_path / "kitchen.hdf5", **kitchen)
    built = D4RLExperienceReplay(KITCHEN, source=tmp_path / "kitchen.hdf5", **kitchen | {"download": "force"})
    assert len(built) == 20


def test_a_damaged_or_half_written_dataset_is_noticed(kitchen):
    dataset = D4RLExperienceReplay(KITCHEN, **kitchen)
    folder = current_directory(dataset.data_path)
    column = next(folder.glob("column_0.bin"))
    column.write_bytes(column.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"column_0\.bin must have 40 bytes: got 39.*download='force'"):
        D4RLExperienceReplay(KITCHEN, **kitchen)
    (folder / MARKER).unlink()  # as if it was never completed
    assert len(D4RLExperienceReplay(KITCHEN, **kitchen)) == 10


def test_what_a_killed_process_left_behind_is_not_taken_for_a_dataset(kitchen):
    class Killed(D4RLExperienceReplay):
        def _read(self, files, notes):
            yield next(super()._read(files, notes))
            os.kill(os.getpid(), signal.SIGKILL)

    process = mp.get_context("fork").Process(target=Killed, args=(KITCHEN,), kwargs=kitchen)
    process.start()
    process.join(60)
    folder = kitchen["root"] / KITCHEN
    assert (folder / "checkpoint.1.draft" / "column_0.bin").exists()
    assert len(D4RLExperienceReplay(KITCHEN, **kitchen)) == 10
    assert sorted(path.name for path in folder.glob("checkpoint*")) == ["checkpoint.2", "checkpoint.current"]


def build(root, started):
    started.wait()
    dataset = D4RLExperienceReplay(KITCHEN, root=root, download=False)
    assert len(dataset) == 10


def test_processes_that_open_one_dataset_build_it_once(kitchen):
    context = mp.get_context("fork")
    started = context.Event()
    workers = [context.Process(target=build, args=(kitchen["root"], started)) for _ in range(2)]
    for worker in workers:
        worker.start()
    started.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert (kitchen["root"] / KITCHEN / "checkpoint.current").read_text() == "checkpoint.1\n"


# --- delete ---
def test_delete_removes_what_llmrl_wrote_and_empty_folders_up_to_the_root(kitchen, tmp_path):
    dataset = D4RLExperienceReplay(KITCHEN, split_trajs=True, **kitchen)
    assert dataset.data_path.exists()
    dataset.delete()
    assert not dataset.data_path.exists()
    assert [path.name for path in dataset.data_path_root.iterdir()] == ["kitchen.hdf5"]
    assert len(dataset[:]) == 3  # what is mapped stays readable
    formats.write_roboset(tmp_path / "seed.h5", [3])
    names = {"root": tmp_path / "other", "source": tmp_path / "seed.h5"}
    RobosetExperienceReplay("DAPG(human)/pen_v2d-v1", **names).delete()
    assert list((tmp_path / "other").iterdir()) == []
    assert (tmp_path / "seed.h5").exists()


# --- a format of one's own ---
class Lines(BaseDatasetExperienceReplay):
    """One trajectory per file, one observation and one reward per line."""

    kind, suffixes = "lines", (".txt",)

    def _read(self, files, notes):
        for path in files:
            values = torch.tensor([[float(part) for part in line.split()] for line in path.read_text().splitlines()])
            seen = {("observation",): values[:, :1]}
            ends = torch.arange(len(values)) == len(values) - 1
            then = {key: following(value) for key, value in seen.items()}
            flags = {"terminated": ends, "truncated": torch.zeros_like(ends)}
            yield ted_rows(str(path), seen, then, reward=values[:, 1], **flags), str(path)


def test_a_format_of_ones_own_needs_one_method(tmp_path):
    (tmp_path / "a.txt").write_text("1 0.5\n2 1\n")
    (tmp_path / "b.txt").write_text("7 2\n")
    dataset = Lines("two", 2, source=tmp_path, root=tmp_path / "root")
    assert dataset[:]["next", "observation"].flatten().tolist() == [2, 0, 0]
    assert dataset[:]["next", "reward"].flatten().tolist() == [0.5, 1, 2]
    with pytest.raises(ConfigError, match=r"must be one of Lines\.available_datasets"):
        Lines("three", root=tmp_path / "root")


# --- names and arguments ---
@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("hoper-medium-v2", {}, r"D4RLExperienceReplay\.available_datasets.*Did you mean 'hopper-medium-v2'"),
        ("../outside", {}, "below root"),
        ("hopper-medium-v2", {"download": "yes"}, "True, False or 'force'"),
        ("hopper-medium-v2", {"download": False}, "neither a dataset nor a file"),
        ("hopper-medium-v2", {"source": "/nowhere"}, "/nowhere, which does not exist"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, name, arguments, error):
    with pytest.raises((ConfigError, DataError), match=error):
        D4RLExperienceReplay(name, root=tmp_path, **arguments)
