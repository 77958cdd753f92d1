"""Gen-DGRL: Procgen episodes in tar archives, one file of arrays per episode (https://arxiv.org/abs/2312.05742)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import RemoteFile
from llmrl.data.datasets.formats import column, load_pickled_array, reading, tar_members, ted_rows
from llmrl.data.ted_utils import expand_right
from llmrl.errors import DataError

_GAMES = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja "
_GAMES += "plunder starpilot"
_FOLDERS = {
    "1M_E": "1M/level_200/expert",
    "1M_S": "1M/level_200/suboptimal",
    "10M": "10M/level_200/expert",
    "25M": "25M/level_200/expert",
    "level_1_E": "100k/level_1/expert",
    "level_1_S": "100k/level_1/suboptimal",
    "level_40_E": "100k/level_40/expert",
    "level_40_S": "100k/level_40/suboptimal",
}


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """A Procgen game and a category, as in ``"bigfish-1M_E"``.

    *Rows* ``observation`` uint8[3, 64, 64], ``action``, ``episode``; under ``"next"`` also ``observation`` and
    ``reward``. Procgen resets itself, so the frame after the end of an episode is the first one of the next level:
    ``("next", "observation")`` is zeros there. Other arguments are those of ``BaseDatasetExperienceReplay``.

    A local source is an archive (``.tar.xz``, ``.tar``), or its ``.npy`` and ``.npz`` files. Pickles in ``.npy``
    files are read only if they hold plain values and arrays.
    """

    kind = "gen_dgrl"
    suffixes = (".tar.xz", ".tar", ".npy", ".npz")
    available_datasets: ClassVar[list[str]] = [f"{game}-{category}" for category in _FOLDERS for game in _GAMES.split()]
    base_url = "https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed"

    def _remote_files(self) -> list[RemoteFile]:
        game, _, category = self.dataset_id.partition("-")
        return [RemoteFile(f"{game}.tar.xz", f"{self.base_url}/{_FOLDERS[category]}/{game}.tar.xz")]

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        for number, (where, content) in enumerate(part for file in files for part in _episodes(file)):
            with reading(where):
                if where.endswith(".npz"):
                    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                        columns: Any = dict(arrays)
                else:
                    columns = load_pickled_array(content)
                if not isinstance(columns, dict):
                    raise DataError(f"{where}: an episode must be a dict of arrays: got a {type(columns).__name__}.")
            rows = _episode(where, columns)
            yield rows.set("episode", torch.full([len(rows)], number)), where


def _episodes(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix in (".npy", ".npz"):
        with reading(file):
            content = file.read_bytes()
        yield str(file), content
        return
    yield from tar_members(file, (".npy", ".npz"))


def _episode(where: str, columns: dict[str, Any]) -> TensorDict:
    frames = torch.from_numpy(np.asarray(column(where, columns, "observations")).astype(np.uint8))
    done = torch.from_numpy(np.asarray(column(where, columns, "dones")).astype(bool)).reshape(-1)
    action = np.asarray(column(where, columns, "actions"))
    if len(frames) != len(action) + 1:
        raise DataError(
            f"{where}: there must be one more observation than actions: got {len(frames)} and {len(action)}."
        )
    # The frame after the end of an episode belongs to the next level.
    then = frames[1:].masked_fill(expand_right(done, frames.ndim), 0) if len(done) == len(action) else frames[1:]
    return ted_rows(
        where,
        {("observation",): frames[:-1], ("action",): action},
        {("observation",): then},
        reward=np.asarray(column(where, columns, "rewards")).astype(np.float32),
        terminated=done,
        truncated=torch.zeros_like(done),
    )
