"""The Atari DQN replay datasets: the experience of five agents per game, in checkpoints of a ring buffer
(https://offline-rl.github.io).

A checkpoint is a set of gzipped ``.npy`` files, ``$store$_observation_ckpt.7.gz`` and the same for ``action``,
``reward`` and ``terminal``: one row per step. The rows are a ring buffer, and ``add_count_ckpt.7.gz`` is the number of
steps ever added: once the ring is full, the oldest row is at ``add_count % rows``.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import RemoteFile
from llmrl.data.datasets.formats import npy_header, reading, ted_rows
from llmrl.data.replay_buffers import Sampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement
from llmrl.data.ted_utils import segment_ids, trajectory_ends
from llmrl.errors import DataError

_GAMES = """AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling
Boxing Breakout Carnival Centipede ChopperCommand CrazyClimber DemonAttack DoubleDunk ElevatorAction Enduro FishingDerby
Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape Kangaroo Krull KungFuMaster MontezumaRevenge
MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris
SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"""
_STORED = ("observation", "action", "reward", "terminal")
_CHECKPOINTS = 50
_PART = 4096  # rows per read


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """A game and an agent, as in ``"Pong/5"``: 50 checkpoints of a million steps.

    *Rows* ``observation`` uint8[84, 84], ``action`` int32; under ``"next"`` also ``observation`` and ``reward``. A
    frame is stored once: on reading, ``("next", "observation")`` is the frame of the following row, or zeros at the end
    of an episode, where the files have no next frame. A last step that does not end an episode is left out. The zero
    frames that the recorder added before each episode are rows too.

    num_slices, slice_len  one of them makes the sampler a ``SliceSampler``; ``strict_len`` is its ``strict_length``
    replacement            False: a sampler without replacement
    num_checkpoints        how many of the checkpoints to download; default all

    ``num_procs`` and ``mp_start_method`` have no effect. ``episodes`` has the episode number of every row,
    ``metadata`` the add count and invalid range of each checkpoint. Other arguments are those of
    ``BaseDatasetExperienceReplay``.
    """

    kind = "atari"
    suffixes = (".gz",)
    available_datasets: ClassVar[list[str]] = [f"{game}/{agent}" for game in _GAMES.split() for agent in range(1, 6)]
    base_url = "https://storage.googleapis.com/atari-replay-datasets/dqn"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        sampler: Sampler | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        num_procs: int = 0,
        mp_start_method: str = "fork",
        num_checkpoints: int = _CHECKPOINTS,
        **arguments: Any,
    ) -> None:
        self.num_checkpoints = num_checkpoints
        if sampler is None and (num_slices is not None or slice_len is not None):
            slices = SliceSampler if replacement else SliceSamplerWithoutReplacement
            end = ("next", "done")
            sampler = slices(num_slices=num_slices, slice_len=slice_len, strict_length=strict_len, end_key=end)
        elif sampler is None and not replacement:
            sampler = SamplerWithoutReplacement()
        options = {"num_checkpoints": num_checkpoints}
        super().__init__(dataset_id, batch_size, sampler=sampler, options=options, **arguments)

    @property
    def episodes(self) -> Tensor:
        """int64[rows]: 0 for the rows of the first episode, 1 for those of the second one, and so on."""
        done = self._storage.entry(("next", "done"), torch.arange(len(self))).reshape(-1)
        return segment_ids(trajectory_ends(done=done))

    def _remote_files(self) -> list[RemoteFile]:
        base = f"{self.base_url}/{self.dataset_id}/replay_logs"
        names = [*(f"$store$_{name}" for name in _STORED), "add_count", "invalid_range"]
        names = [f"{name}_ckpt.{number}.gz" for number in range(self.num_checkpoints) for name in names]
        return [RemoteFile(name, f"{base}/{name.replace('$', '%24')}") for name in names]

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        notes["following"] = ["observation"]
        notes["metadata"] = {"dataset_id": self.dataset_id, "checkpoints": []}
        # ``seen``: steps read so far. ``held``: the newest row, yielded only once its following row is known, because
        # its next observation is read from there.
        seen, held = 0, None
        for number, paths in _checkpoints(files):
            where = f"{paths['observation'].parent}, checkpoint {number}"
            shapes = {name: _npy_shape(paths[name])[0] for name in _STORED}
            count = shapes["observation"]
            if set(shapes.values()) != {count}:
                raise DataError(f"{where}: the files must have the same number of rows: got {shapes}.")
            if "add_count" in paths:
                added = int(_npy(paths["add_count"]))
                oldest = max(added - count, 0)  # earlier steps were overwritten
                runs = _runs(max(oldest, seen), added, count)
            else:
                added, oldest, runs = seen + count, seen, [(0, count)]  # assumed to continue the previous checkpoint
            about = {"number": number, "add_count": added}
            if "invalid_range" in paths:
                about["invalid_range"] = _npy(paths["invalid_range"]).tolist()
            notes["metadata"]["checkpoints"].append(about)
            if held is not None and oldest > seen and not bool(held["next", "done"]):
                held = None  # steps are missing between the checkpoints, so the following row is unknown
            for start, stop in runs:
                for rows in _rows(where, paths, start, stop):
                    if held is not None:
                        yield held, where
                    held = rows[-1:]
                    if len(rows) > 1:
                        yield rows[:-1], where
            seen = max(seen, added)
        if held is not None and bool(held["next", "done"]):
            yield held, where


def _checkpoints(files: list[Path]) -> list[tuple[int, dict[str, Path]]]:
    """(checkpoint number, files by content name), in order of time."""
    found: dict[int, dict[str, Path]] = {}
    for path in files:
        name, _, number = path.name.removesuffix(".gz").rpartition("_ckpt.")
        if number.isdecimal():
            found.setdefault(int(number), {})[name.removeprefix("$store$_")] = path
    for number, paths in found.items():
        if missing := [name for name in _STORED if name not in paths]:
            raise DataError(
                f"AtariDQNExperienceReplay: checkpoint {number} must have $store$_{missing[0]}_ckpt.{number}.gz: found "
                f"{sorted(path.name for path in paths.values())}."
            )
    if not found:
        raise DataError(
            f"AtariDQNExperienceReplay: files must be named like $store$_observation_ckpt.0.gz: got {files[0].name}."
        )
    return sorted(found.items())


def _runs(first: int, end: int, size: int) -> list[tuple[int, int]]:
    """The (start, stop) row ranges of the steps ``first .. end - 1`` in a ring of ``size`` rows, oldest first."""
    if first >= end:
        return []
    start, stop = first % size, (end - 1) % size + 1
    return [(start, stop)] if start < stop else [(start, size), (0, stop)]


def _rows(where: str, paths: dict[str, Path], start: int, stop: int) -> Iterator[TensorDict]:
    parts = zip(*(_npy_rows(paths[name], start, stop) for name in _STORED), strict=True)
    for observation, action, reward, terminal in parts:
        ends = terminal.astype(bool)
        now = {("observation",): observation, ("action",): action}
        yield ted_rows(where, now, {}, reward=reward, terminated=ends, truncated=np.zeros_like(ends))


def _npy_rows(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yields the rows of a gzipped array in parts, because a checkpoint has 7 GB of frames."""
    count, row, dtype = _npy_shape(path)
    size = int(np.prod(row)) * dtype.itemsize
    with reading(path), gzip.open(path, "rb") as file:
        _header(path, file)
        at = 0
        while at < stop:
            # gzip has no random access: rows before ``start`` are read and dropped.
            wanted = min(_PART, (start if at < start else stop) - at)
            content = file.read(wanted * size)
            if len(content) < wanted * size:
                raise DataError(
                    f"{path}, row {at + len(content) // size}: the file must have {count} rows: it ends here."
                )
            if at >= start:
                yield np.frombuffer(bytearray(content), dtype).reshape(wanted, *row)
            at += wanted


def _npy_shape(path: Path) -> tuple[int, tuple[int, ...], np.dtype]:
    with reading(path), gzip.open(path, "rb") as file:
        return _header(path, file)


def _header(path: Path, file: Any) -> tuple[int, tuple[int, ...], np.dtype]:
    shape, by_columns, dtype = npy_header(file)
    if not shape or by_columns or dtype.hasobject:
        raise DataError(f"{path}: the file must hold an array of numbers, row after row: got {dtype} of shape {shape}.")
    return shape[0], shape[1:], dtype


def _npy(path: Path) -> np.ndarray:
    with reading(path), gzip.open(path, "rb") as file:
        return np.load(file, allow_pickle=False)
