"""Small files in the formats of public offline datasets, as their publishers write them."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

h5py = pytest.importorskip("h5py")


def write_d4rl(path: Path, ends: dict[str, list[int]], count: int = 10, **extra: np.ndarray) -> dict[str, np.ndarray]:
    """Rows numbered from 0; ``ends`` are the rows with a terminal and those with a timeout."""
    step = np.arange(count, dtype=np.float32)
    arrays = {
        "observations": np.stack([step, step + 0.5], 1),
        "actions": step[:, None] * 10,
        "rewards": step / 4,
        "terminals": np.isin(np.arange(count), ends.get("terminals", [])),
        "timeouts": np.isin(np.arange(count), ends.get("timeouts", [])),
        "infos/qpos": step[:, None] + 100,
        **extra,
    }
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file["metadata/algorithm"] = "SAC"
    return arrays


def write_atari(folder: Path, number: int, frames: np.ndarray, terminals: list[int], added: int | None = None) -> None:
    """One checkpoint; action and reward of a row tell its first pixel."""
    count = len(frames)
    value = frames.reshape(count, -1)[:, 0]
    arrays = {
        "$store$_observation": frames,
        "$store$_action": value.astype(np.int32),
        "$store$_reward": value.astype(np.float32) / 2,
        "$store$_terminal": np.isin(np.arange(count), terminals).astype(np.uint8),
        "add_count": np.asarray(count if added is None else added),
        "invalid_range": np.arange(5),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in arrays.items():
        with gzip.open(folder / f"{name}_ckpt.{number}.gz", "wb") as file:
            np.save(file, values)


def write_dgrl(path: Path, lengths: list[int]) -> list[dict[str, np.ndarray]]:
    """An archive of episodes, each a pickled dict in a .npy file; the last frame is of the next level."""
    episodes = []
    with tarfile.open(path, "w:xz") as archive:
        for number, length in enumerate(lengths):
            frames = (
                np.full((length + 1, 3, 4, 4), 50 * number, np.float32) + np.arange(length + 1)[:, None, None, None]
            )
            done = np.arange(length) == length - 1
            rewards = np.arange(length, dtype=np.float32)[:, None]
            episode = {"observations": frames, "actions": np.arange(length)[:, None], "rewards": rewards, "dones": done}
            file = io.BytesIO()
            np.save(file, episode, allow_pickle=True)
            _add(archive, f"bigfish/{number}_{length}.npy", file.getvalue())
            episodes.append(episode)
    return episodes


def write_openx(path: Path, lengths: list[int]) -> None:
    """An archive of episodes, each a pickle of RLDS steps, with an encoded image and a text."""
    with tarfile.open(path, "w") as archive:
        for number, length in enumerate(lengths):
            steps = []
            for step in range(length):
                png = io.BytesIO()
                Image.fromarray(np.full((4, 6, 3), 10 * number + step, np.uint8)).save(png, "png")
                observation = {"image": {"bytes": png.getvalue(), "path": None}, "state": [float(step), float(number)]}
                flags = {"is_first": step == 0, "is_last": step == length - 1, "is_terminal": step == length - 1}
                values = {"reward": float(step == length - 1), "discount": 1.0, "action": np.full(2, step, np.float64)}
                texts = {"language_instruction": f"task {number}", "unused": None}
                steps.append({"observation": observation, **flags, **values, **texts})
            _add(archive, f"cmu_stretch_{number}.data.pickle", pickle.dumps({"steps": steps}))


def write_roboset(path: Path, lengths: list[int]) -> None:
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            step = np.arange(length, dtype=np.float64)
            arrays = {"observations": step[:, None] + 100 * number, "actions": step[:, None] * 2, "rewards": step / 8}
            arrays |= {"done": np.arange(length) == length - 1, "time": step * 0.04, "env_infos/solved": step[:, None]}
            for name, values in arrays.items():
                file[f"Trial{number}/{name}"] = values


def write_vd4rl(path: Path, steps: int = 5, *, first: int = 0, terminal: bool = False) -> None:
    """An episode of ``steps`` transitions: pixels, and the action that led to each."""
    at = np.arange(steps + 1)
    image = np.full((steps + 1, 8, 8, 3), first, np.uint8) + at.astype(np.uint8)[:, None, None, None]
    last = at == steps
    arrays = {"image": image, "action": np.where(at > 0, at, 0)[:, None].astype(np.float32)}
    arrays |= {"reward": at.astype(np.float32) * 3, "discount": np.where(last & terminal, 0, 1).astype(np.float32)}
    arrays |= {"is_first": at == 0, "is_last": last, "is_terminal": last & terminal, "height": at.astype(np.float32)}
    np.savez(path, **arrays)


def write_vd4rl_shard(path: Path, lengths: list[int]) -> None:
    """Episodes end to end in one HDF5 file, with pixels [3, 8, 8] and the kind of every step."""
    at = np.concatenate([np.arange(length + 1) for length in lengths])
    kind = np.concatenate([[0] + [1] * (length - 1) + [2] for length in lengths])
    pixels = np.broadcast_to(np.arange(len(at), dtype=np.uint8)[:, None, None, None], (len(at), 3, 8, 8))
    arrays = {"observation": pixels, "action": at[:, None].astype(np.float32), "reward": at.astype(np.float32)}
    arrays |= {"discount": np.ones(len(at), np.float32), "step_type": kind.astype(np.float64)}
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip")


ARFF = """% A small table.
@RELATION adult

@ATTRIBUTE age numeric
@ATTRIBUTE 'hours per week' REAL
@ATTRIBUTE race {White, Black, 'Asian-Pac'}
@ATTRIBUTE occupation {Sales, Craft, Tech}
@ATTRIBUTE class {'>50K', '<=50K'}
@DATA
20,10,White,Sales,'>50K'
40,10,Black,Tech,'<=50K'
% a remark
30,?,White,Tech,'<=50K'
60,10,'Asian-Pac',Craft,'>50K'
"""


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))
