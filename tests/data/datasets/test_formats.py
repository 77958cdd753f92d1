"""Every public format, row by row against the arrays that were written."""

import gzip
import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from llmrl.data.datasets import (
    AtariDQNExperienceReplay,
    D4RLExperienceReplay,
    GenDGRLExperienceReplay,
    MinariExperienceReplay,
    OpenMLExperienceReplay,
    OpenXExperienceReplay,
    RobosetExperienceReplay,
    VD4RLExperienceReplay,
)
from llmrl.data.datasets.formats import load_pickle
from llmrl.errors import ConfigError, DataError, UnsupportedError
from tests.support import public_formats as formats

h5py, minari = pytest.importorskip("h5py"), pytest.importorskip("minari")
spaces = pytest.importorskip("gymnasium").spaces

FLAGS = ("done", "terminated", "truncated")


def ends(dataset) -> dict[str, list[int]]:
    rows = dataset[:]
    assert not any(rows[name].any() for name in FLAGS)
    assert all(rows["next", name].shape == (len(dataset), 1) for name in (*FLAGS, "reward"))
    return {name: rows["next", name].flatten().nonzero().flatten().tolist() for name in FLAGS}


# --- D4RL ---
@pytest.mark.parametrize("part", [4, 1 << 16])
def test_d4rl_rows_are_those_of_the_file_in_parts_of_any_size(tmp_path, monkeypatch, part):
    monkeypatch.setattr("llmrl.data.datasets.d4rl._PART", part)
    written = formats.write_d4rl(tmp_path / "hopper.hdf5", {"terminals": [3], "timeouts": [7]})
    dataset = D4RLExperienceReplay("hopper", 4, root=tmp_path / "root", source=tmp_path / "hopper.hdf5")
    rows = dataset[:]
    assert len(dataset) == 9  # the last row does not end an episode, and its next one is unknown
    columns = {"observation": "observations", "action": "actions", ("infos", "qpos"): "infos/qpos"}
    for key, column in columns.items():
        np.testing.assert_array_equal(rows[key], written[column][:9])
    np.testing.assert_array_equal(rows["next", "reward"][:, 0], written["rewards"][:9])
    assert ends(dataset) == {"terminated": [3], "truncated": [7], "done": [3, 7]}
    assert rows["timeouts"].nonzero().flatten().tolist() == [7]
    expected = written["observations"][1:10].copy()
    expected[[3, 7]] = 0
    np.testing.assert_array_equal(rows["next", "observation"], expected)
    assert dataset.sample()["index"].shape == (4,)


def test_d4rl_files_with_next_observations_lose_no_row(tmp_path):
    known = np.arange(20, dtype=np.float32).reshape(10, 2)
    formats.write_d4rl(tmp_path / "a.hdf5", {"timeouts": [4]}, next_observations=known)
    dataset = D4RLExperienceReplay("a", root=tmp_path, source=tmp_path / "a.hdf5", terminate_on_end=False)
    assert dataset[:]["next", "observation"].tolist() == known.tolist()


def test_d4rl_options_of_timeouts(tmp_path):
    formats.write_d4rl(tmp_path / "a.hdf5", {"terminals": [9], "timeouts": [4, 9]})
    arguments = {"source": tmp_path / "a.hdf5", "use_truncated_as_done": False}
    kept = D4RLExperienceReplay("kept", root=tmp_path, **arguments)
    assert ends(kept) == {"terminated": [9], "truncated": [4, 9], "done": [9]}
    without = D4RLExperienceReplay("without", root=tmp_path, terminate_on_end=False, **arguments)
    assert without[:]["action"].flatten().tolist() == [0, 10, 20, 30, 50, 60, 70, 80, 90]


# --- Atari ---
def frames(values) -> np.ndarray:
    return np.asarray(values, np.uint8)[:, None, None] * np.ones((1, 6, 6), np.uint8)


def test_atari_stores_every_frame_once(tmp_path):
    formats.write_atari(tmp_path / "logs", 0, frames(range(1, 9)), [2, 7])
    dataset = AtariDQNExperienceReplay("Pong/5", root=tmp_path / "root", source=tmp_path / "logs")
    rows = dataset[:]
    assert rows["observation"][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows["next", "observation"][:, 0, 0].tolist() == [2, 3, 0, 5, 6, 7, 8, 0]
    assert rows["action"].dtype is torch.int32
    assert rows["next", "reward"].flatten().tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert ends(dataset) == {"terminated": [2, 7], "truncated": [], "done": [2, 7]}
    assert dataset.episodes.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert dataset[4]["next", "observation"].unique().tolist() == [6]
    files = list(dataset.data_path.rglob("column_*.bin"))
    assert sum(file.stat().st_size for file in files) == 8 * (36 + 4 + 4 + 6)  # frame, action, reward, six flags
    assert dataset.metadata["checkpoints"] == [{"number": 0, "add_count": 8, "invalid_range": [0, 1, 2, 3, 4]}]


@pytest.mark.parametrize(
    ("checkpoints", "seen", "then"),
    [
        # The first was saved before its last row was written; the second holds that row in the same place.
        ([([1, 2, 3, 99], [], 3), ([5, 6, 7, 4], [2], 7)], [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 0]),
        # Steps are missing between them: what followed the row before is not known.
        ([([1, 2, 3], [], 3), ([21, 22, 23], [2], 15)], [1, 2, 21, 22, 23], [2, 21, 22, 23, 0]),
    ],
)
def test_atari_checkpoints_are_rings_that_continue(tmp_path, checkpoints, seen, then):
    for number, (pixels, terminals, added) in enumerate(checkpoints):
        formats.write_atari(tmp_path, 4 * number, frames(pixels), terminals, added)
    rows = AtariDQNExperienceReplay("Pong/1", root=tmp_path / "root", source=tmp_path)[:]
    assert rows["observation"][:, 0, 0].tolist() == seen
    assert rows["next", "observation"][:, 0, 0].tolist() == then


def test_atari_slices_come_from_single_episodes(tmp_path):
    formats.write_atari(tmp_path, 0, frames(range(1, 21)), [6, 19])
    dataset = AtariDQNExperienceReplay("Pong/1", 12, slice_len=4, root=tmp_path / "root", source=tmp_path)
    for _ in range(20):
        values = dataset.sample()["observation"][:, 0, 0].view(3, 4).to(int)
        assert (values.diff(dim=1) == 1).all()
        assert not ((values[:, 0] <= 7) & (values[:, -1] > 7)).any()


def test_atari_a_truncated_file_is_named_with_its_row(tmp_path):
    formats.write_atari(tmp_path, 0, frames(range(1, 9)), [7])
    file = tmp_path / "$store$_reward_ckpt.0.gz"
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(content[:-5]))
    with pytest.raises(DataError, match=r"reward_ckpt\.0\.gz, row 6: .*8 rows"):
        AtariDQNExperienceReplay("Pong/1", root=tmp_path / "root", source=tmp_path)


# --- Gen-DGRL ---
def test_gen_dgrl_rows_are_those_of_the_archive(tmp_path):
    episodes = formats.write_dgrl(tmp_path / "bigfish.tar.xz", [3, 2])
    dataset = GenDGRLExperienceReplay("bigfish-1M_E", root=tmp_path, source=tmp_path / "bigfish.tar.xz")
    rows = dataset[:]
    assert rows["observation"].dtype is torch.uint8
    assert rows["observation"][:, 0, 0, 0].tolist() == [0, 1, 2, 50, 51]
    assert rows["next", "observation"][:, 0, 0, 0].tolist() == [1, 2, 0, 51, 0]
    assert rows["action"].tolist() == [*episodes[0]["actions"].tolist(), *episodes[1]["actions"].tolist()]
    assert rows["next", "reward"].flatten().tolist() == [0, 1, 2, 0, 1]
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1]
    assert ends(dataset) == {"terminated": [2, 4], "truncated": [], "done": [2, 4]}


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (eval, ("1 + 1",))

    file = io.BytesIO()
    np.save(file, np.array({"observations": Evil()}, dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        formats._add(archive, "0.npy", file.getvalue())
    with pytest.raises(DataError, match=r"a\.tar, 0\.npy.*builtins\.eval"):
        GenDGRLExperienceReplay("a", root=tmp_path, source=tmp_path / "a.tar")
    with pytest.raises(pickle.UnpicklingError, match="eval"):
        load_pickle(pickle.dumps(Evil()))


# --- Minari ---
SPACES = {
    "action_space": spaces.Box(-1, 1, (3,), np.float32),
    "observation_space": spaces.Dict(
        {
            "position": spaces.Box(-9, 9, (2,), np.float64),
            "goals": spaces.Tuple([spaces.Discrete(20), spaces.Discrete(20)]),
            "mission": spaces.Text(10, charset="go 0123456789"),
        }
    ),
}


def write_minari(name: str, data_format: str) -> list[np.ndarray]:
    """Two equal episodes of three steps, written by Minari; returns the actions."""
    actions = [np.full(3, 0.1 * (step + 1), np.float32) for step in range(3)]
    at = range(4)
    observations = {
        "position": [np.full(2, step, float) for step in at],
        "goals": ([*at], [step + 1 for step in at]),
        "mission": [f"go {step}" for step in at],
    }
    columns = {"observations": observations, "actions": actions, "infos": {"speed": [0.5, 1.0, 2.0, 3.0]}}
    columns |= {"rewards": [0.5, 1.0, 1.5], "terminations": [False, False, True], "truncations": [False] * 3}
    buffers = [minari.data_collector.EpisodeBuffer(id=number, **columns) for number in range(2)]
    about = dict.fromkeys(("algorithm_name", "author", "author_email", "code_permalink", "description"), "x")
    minari.create_dataset_from_buffers(name, buffers, data_format=data_format, **about, **SPACES)
    return actions * 2


@pytest.mark.filterwarnings("ignore:(`eval_env`|env_spec):UserWarning")
@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_minari_rows_are_those_of_the_episodes(tmp_path, monkeypatch, data_format):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    actions = write_minari("llmrl/nested-v0", data_format)
    dataset = MinariExperienceReplay("llmrl/nested-v0", 2, root=tmp_path / "root", load_from_local_minari=True)
    rows = dataset[:]
    assert rows["observation", "position"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["next", "observation", "position"][:, 1].tolist() == [1, 2, 3, 1, 2, 3]
    assert rows["observation", "goals", "1"].tolist() == [1, 2, 3, 1, 2, 3]
    assert rows.get(("observation", "mission")).tolist() == ["go 0", "go 1", "go 2"] * 2
    assert rows.get(("next", "observation", "mission")).tolist() == ["go 1", "go 2", "go 3"] * 2
    np.testing.assert_array_equal(rows["action"], actions)
    assert rows["info", "speed"].flatten().tolist() == [0.5, 1, 2, 0.5, 1, 2]
    assert rows["next", "info", "speed"].flatten().tolist() == [1, 2, 3, 1, 2, 3]
    assert rows["next", "reward"].flatten().tolist() == [0.5, 1, 1.5] * 2
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1, 1]
    assert ends(dataset) == {"terminated": [2, 5], "truncated": [], "done": [2, 5]}
    assert dataset.metadata["total_episodes"] == 2
    split = MinariExperienceReplay("llmrl/nested-v0", root=tmp_path / "root", split_trajs=True)
    assert split[:].get(("observation", "mission")).tolist() == [["go 0", "go 1", "go 2"]] * 2


# --- OpenML ---
def test_openml_scales_numbers_and_numbers_categories(tmp_path):
    (tmp_path / "179.arff").write_text(formats.ARFF)
    dataset = OpenMLExperienceReplay("adult_num", 2, root=tmp_path, source=tmp_path / "179.arff")
    rows = dataset[:]
    age, race = np.array([20.0, 40, 60]), np.array([2.0, 1, 0])  # Asian-Pac, Black, White
    expected = [(age - 40) / age.std(), np.zeros(3), (race - 1) / race.std()]
    np.testing.assert_allclose(rows["X"], np.stack(expected, 1), rtol=1e-6)
    assert rows["y"].tolist() == [1, 2, 0]
    assert dataset.max_outcome_val == 2
    assert [len(batch) for batch in dataset] == [2, 1]  # each row once
    one_hot = OpenMLExperienceReplay("adult_onehot", 2, root=tmp_path, source=tmp_path / "179.arff")
    assert one_hot[:]["X"][:, 2:].tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("50,ten,White,Sales,'>50K'", "line 15: 'hours per week' must be a number: got 'ten'"),
        ("1,2", "line 15.*5 values"),
    ],
)
def test_openml_names_line_and_column(tmp_path, line, error):
    (tmp_path / "a.arff").write_text(f"{formats.ARFF}{line}\n")
    with pytest.raises(DataError, match=error):
        OpenMLExperienceReplay("adult_num", root=tmp_path, source=tmp_path / "a.arff")


# --- Open X-Embodiment ---
def test_openx_rows_are_those_of_the_steps(tmp_path):
    formats.write_openx(tmp_path / "cmu_stretch_00000.tar", [3, 2])
    dataset = OpenXExperienceReplay("cmu_stretch", 2, num_slices=1, root=tmp_path / "root", source=tmp_path)
    rows = dataset[:]
    assert rows["observation", "image"].shape == (5, 3, 4, 6)
    assert rows["observation", "image"][:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11]
    assert rows["next", "observation", "image"][:, 2, 3, 5].tolist() == [1, 2, 0, 11, 0]
    assert rows["observation", "state"].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert rows["action"].dtype is torch.float64
    assert rows["is_init"].tolist() == [True, False, False, True, False]
    assert rows.get("language_instruction").tolist() == ["task 0"] * 3 + ["task 1"] * 2
    assert rows["next", "reward"].flatten().tolist() == [0, 0, 1, 0, 1]
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1]
    assert ends(dataset) == {"terminated": [2, 4], "truncated": [], "done": [2, 4]}
    sample = dataset.sample()
    assert sample["episode"].unique().numel() == 1
    assert sample.get("language_instruction").tolist() == [f"task {int(sample['episode'][0])}"] * 2


def test_openx_streams_slices_of_one_trajectory_after_the_other(tmp_path):
    formats.write_openx(tmp_path / "a.tar", [3, 5])
    arguments = {"root": tmp_path / "root", "source": tmp_path, "streaming": True, "shuffle": False}
    dataset = OpenXExperienceReplay("cmu_stretch", num_slices=2, **arguments)
    for _ in range(3):
        sample = dataset.sample(4)
        state = sample["observation", "state"].view(2, 2, 2)
        assert state[:, :, 1].tolist() == [[0, 0], [1, 1]]
        assert (state[:, 1, 0] - state[:, 0, 0]).tolist() == [1, 1]
        assert sample["next", "done"].flatten().tolist() == [False, True, False, True]
        assert sample.get("language_instruction").tolist() == ["task 0"] * 2 + ["task 1"] * 2
    with pytest.raises(DataError, match="got 3 steps, expected 4"):
        dataset.sample(8)
    padded = OpenXExperienceReplay("cmu_stretch", slice_len=4, pad=-1, **arguments).sample(4)
    assert padded["action"].tolist() == [[0, 0], [1, 1], [2, 2], [-1, -1]]
    with pytest.raises(UnsupportedError, match="a stream has no length"):
        len(dataset)
    shuffled = OpenXExperienceReplay("cmu_stretch", **{**arguments, "shuffle": True})
    assert sorted(len(rows) for rows in shuffled) == [3, 5]


@pytest.mark.parametrize(
    "arguments",
    [{"pad": 0}, {"shuffle": False}, {"num_slices": 1, "slice_len": 2}, {"streaming": True, "replacement": True}],
)
def test_arguments_that_do_not_fit_or_ask_for_the_old_package_are_refused(tmp_path, arguments):
    with pytest.raises(ConfigError, match="arguments must fit"):
        OpenXExperienceReplay("cmu_stretch", root=tmp_path, **arguments)
    with pytest.raises(UnsupportedError, match="gymnasium"):
        D4RLExperienceReplay("hopper-medium-v2", root=tmp_path, from_env=True)


# --- RoboSet ---
def test_roboset_rows_are_those_of_the_trials(tmp_path):
    for name, lengths in (("seed_a.h5", [3, 2]), ("seed_b.h5", [2])):
        formats.write_roboset(tmp_path / name, lengths)
    dataset = RobosetExperienceReplay("DAPG(expert)/door_v2d-v1", 4, root=tmp_path / "root", source=tmp_path)
    rows = dataset[:]
    assert rows["observation"].flatten().tolist() == [0, 1, 2, 100, 101, 0, 1]
    assert rows["next", "observation"].flatten().tolist() == [1, 2, 0, 101, 0, 1, 0]
    assert rows["next", "info", "solved"].flatten().tolist() == [1, 2, 0, 1, 0, 1, 0]
    assert rows["next", "reward"].flatten().tolist() == [0, 1 / 8, 2 / 8, 0, 1 / 8, 0, 1 / 8]
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert rows["seed"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert ends(dataset) == {"terminated": [2, 4, 6], "truncated": [], "done": [2, 4, 6]}


# --- V-D4RL ---
def test_vd4rl_puts_an_action_beside_the_frame_that_it_was_taken_in(tmp_path):
    formats.write_vd4rl(tmp_path / "a-5.npz", first=10)
    formats.write_vd4rl(tmp_path / "b-2.npz", steps=2, first=50, terminal=True)
    dataset = VD4RLExperienceReplay("main/x", root=tmp_path / "root", source=tmp_path, totensor=False, num_workers=0)
    rows = dataset[:]
    assert rows["pixels"][:, 0, 0, 0].tolist() == [10, 11, 12, 13, 14, 50, 51]
    assert rows["next", "pixels"][:, 0, 0, 0].tolist() == [11, 12, 13, 14, 15, 51, 52]
    assert rows["action"].flatten().tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert rows["next", "reward"].flatten().tolist() == [3, 6, 9, 12, 15, 3, 6]
    assert rows["observation", "height"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert rows["is_init"].nonzero().flatten().tolist() == [0, 5]
    assert ends(dataset) == {"terminated": [6], "truncated": [4], "done": [4, 6]}
    scaled = VD4RLExperienceReplay("main/x", 3, root=tmp_path / "root", image_size=4).sample()
    assert scaled["pixels"].shape == (3, 3, 4, 4)
    torch.testing.assert_close(scaled["pixels"][:, 1, 2, 3] * 255, rows["pixels"][scaled["index"], 0, 0, 0].float())


@pytest.mark.parametrize("name", ["image", "action", "is_first"])
def test_vd4rl_columns_must_have_as_many_rows_as_there_are_frames(tmp_path, name):
    formats.write_vd4rl(tmp_path / "a.npz")
    columns = dict(np.load(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", **columns | {name: columns[name][:4]})
    frames, other = (4, "got 6 of ") if name == "image" else (6, f"got 4 of '{name}'")
    with pytest.raises(DataError, match=rf"a\.npz: every column must have {frames} rows, as the frames: {other}"):
        VD4RLExperienceReplay("a", root=tmp_path / "root", source=tmp_path / "a.npz")


# --- broken files ---
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rewards": np.zeros(7)}, r"must have 7 rows.*got 10 of actions"),
        ({"rewards": np.where(np.arange(10) == 4, np.nan, 0)}, r"broken\.hdf5, row 4: the reward must be a finite"),
        ({"terminal": np.zeros(10)}, r"column 'terminals'.*Did you mean 'terminal'\?"),
    ],
)
def test_a_wrong_column_is_named_with_its_file_and_row(tmp_path, change, error):
    formats.write_d4rl(tmp_path / "broken.hdf5", {"terminals": [9]}, **change)
    if "terminal" in change:
        with h5py.File(tmp_path / "broken.hdf5", "a") as file:
            del file["terminals"]
    with pytest.raises(DataError, match=error):
        D4RLExperienceReplay("a", root=tmp_path / "root", source=tmp_path / "broken.hdf5")


@pytest.mark.parametrize(
    ("cls", "name", "write"),
    [
        (D4RLExperienceReplay, "a.hdf5", lambda path: formats.write_d4rl(path, {"terminals": [9]})),
        (RobosetExperienceReplay, "a.h5", lambda path: formats.write_roboset(path, [9])),
        (VD4RLExperienceReplay, "a.npz", formats.write_vd4rl),
        (GenDGRLExperienceReplay, "a.tar.xz", lambda path: formats.write_dgrl(path, [9])),
        (OpenXExperienceReplay, "a.tar", lambda path: formats.write_openx(path, [9])),
        (OpenMLExperienceReplay, "a.arff", lambda path: path.write_text(formats.ARFF)),
    ],
)
def test_a_file_that_was_cut_is_named_and_nothing_is_left(tmp_path, cls, name, write):
    path = tmp_path / name
    write(path)
    content = path.read_bytes()
    end = 1024 if name == "a.tar" else 2 * len(content) // 3 - 7  # an archive is padded
    path.write_bytes(content[:end])
    with pytest.raises(DataError, match=f"{tmp_path}/{name}"):
        cls("a", root=tmp_path / "root", source=path)
    assert not list((tmp_path / "root").rglob("*.bin"))


def test_minari_names_a_server_that_cannot_be_reached(tmp_path):
    with pytest.raises(DataError, match=r"Minari's server must answer.*offline mode"):  # as the tests run
        MinariExperienceReplay("D4RL/door/human-v2", root=tmp_path)


def test_openx_iterates_over_trajectories_without_a_batch_size(tmp_path):
    formats.write_openx(tmp_path / "a.tar", [3, 5])
    arguments = {"root": tmp_path / "root", "source": tmp_path, "shuffle": False, "replacement": False}
    rows = list(OpenXExperienceReplay("cmu_stretch", **arguments))
    assert [each["observation", "state"][:, 0].tolist() for each in rows] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [len(each) for each in OpenXExperienceReplay("cmu_stretch", slice_len=2, **arguments)] == [2, 2]


def test_vd4rl_shards_are_cut_where_an_episode_begins(tmp_path):
    formats.write_vd4rl_shard(tmp_path / "shard.hdf5", [2, 3])
    dataset = VD4RLExperienceReplay("main/84", root=tmp_path, source=tmp_path / "shard.hdf5", totensor=False)
    rows = dataset[:]
    assert rows["pixels"][:, 0, 0, 0].tolist() == [0, 1, 3, 4, 5]
    assert rows["next", "pixels"][:, 2, 7, 7].tolist() == [1, 2, 4, 5, 6]
    assert rows["action"].flatten().tolist() == [1, 2, 1, 2, 3]
    assert ends(dataset) == {"terminated": [], "truncated": [1, 4], "done": [1, 4]}


def test_an_archive_that_ends_between_two_episodes_is_noticed(tmp_path):
    path = tmp_path / "a.tar"
    formats.write_openx(path, [2, 2])
    with tarfile.open(path) as archive:
        second = archive.getmembers()[1].offset
    path.write_bytes(path.read_bytes()[:second])
    with pytest.raises(DataError, match="no end-of-archive marker"):
        OpenXExperienceReplay("a", root=tmp_path / "root", source=path)
