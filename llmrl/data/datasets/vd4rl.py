"""V-D4RL: control tasks from pixels, as episodes in .npz files or HDF5 shards; hub: conglu/vd4rl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import RemoteFile, hub_files
from llmrl.data.datasets.formats import column, open_h5, reading, ted_rows
from llmrl.errors import DataError

_PIXELS = ("pixels", ("next", "pixels"))
_LEVELS = ("expert", "medium", "medium_expert", "medium_replay", "random")
_KNOWN = ("image", "observation", "action", "reward", "discount", "step_type", "is_first", "is_last", "is_terminal")


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """Tasks of the DeepMind Control Suite with pixel observations, as in ``"main/walker_walk/random/64px"``.

    *Rows* ``pixels``, ``action``, ``is_init``, ``episode`` and, under ``observation``, other columns of the file
    (``height``, ``velocity``, ...); under ``"next"`` also ``pixels``, ``observation``, ``reward`` and ``discount``.
    The files store an action with the frame that it led to; here it is in the row of the previous frame.

    totensor    True: pixels are read as float32 [3, H, W] in [0, 1], else as stored
    image_size  a number or (height, width): pixels are resized to it when they are read

    ``num_workers`` has no effect. Other arguments are those of ``BaseDatasetExperienceReplay``; HDF5 shards
    need the extra ``h5``.
    """

    kind = "vd4rl"
    suffixes = (".npz", ".hdf5", ".h5")
    available_datasets: ClassVar[list[str]] = [
        *(f"main/{task}/{level}/64px" for task in ("cheetah_run", "humanoid_walk", "walker_walk") for level in _LEVELS),
        *(f"distracting/walker_walk_random/64px/{level}" for level in ("easy", "medium", "hard")),
        *(f"multitask/{task}_random/64px" for task in ("cheetah_run", "walker_walk")),
    ]
    repository, repository_folder = "conglu/vd4rl", "vd4rl"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        num_workers: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(dataset_id, batch_size, **arguments)
        if totensor or image_size is not None:
            size = [image_size] * 2 if isinstance(image_size, int) else image_size
            self.append_transform(_Pixels(totensor, None if size is None else list(size)))

    def _remote_files(self) -> list[RemoteFile]:
        return hub_files(self._who, self.repository, f"{self.repository_folder}/{self.dataset_id}", self.suffixes)

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        for number, (where, columns) in enumerate(part for path in files for part in _episodes(self._who, path)):
            rows = _rows(where, columns)
            yield rows.set("episode", torch.full([len(rows)], number)), where


def _episodes(who: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the episode of an .npz file, or those of a shard, which is split where ``step_type`` is 0 (first step)."""
    if path.suffix == ".npz":
        with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            episode = dict(arrays)
        yield str(path), episode
        return
    with open_h5(who, path) as file:
        starts = np.flatnonzero(np.asarray(column(str(path), file, "step_type")) == 0)
        count = len(file["step_type"])
        if not len(starts) or starts[0] != 0:
            raise DataError(f"{path}, row 0: 'step_type' must be 0, the first step of an episode.")
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            where = f"{path}, rows {start} to {stop - 1}"
            with reading(where):
                yield where, {name: values[start:stop] for name, values in file.items()}


def _rows(where: str, columns: dict[str, Any]) -> TensorDict:
    pixels = columns["image"] if "image" in columns else column(where, columns, "observation")
    reward, discount = (np.asarray(column(where, columns, name)).reshape(-1) for name in ("reward", "discount"))
    for name, values in columns.items():
        if len(values) != len(pixels):
            raise DataError(
                f"{where}: every column must have {len(pixels)} rows, as the frames: got {len(values)} of {name!r}."
            )
    terminal = columns.get("is_terminal", discount == 0)
    terminated = np.asarray(terminal).reshape(-1).astype(bool)[1:]
    truncated = np.zeros_like(terminated)
    truncated[-1:] = ~terminated[-1:]
    # Row t of a file has a frame and the action that led to it, so actions, rewards and flags shift by one row.
    state = {name: np.asarray(values) for name, values in columns.items() if name not in _KNOWN}
    both = {("pixels",): np.asarray(pixels), **{("observation", name): values for name, values in state.items()}}
    first = np.arange(len(reward) - 1) == 0
    now = {key: values[:-1] for key, values in both.items()}
    now |= {("action",): np.asarray(column(where, columns, "action"))[1:], ("is_init",): first}
    then = {**{key: values[1:] for key, values in both.items()}, ("discount",): discount[1:]}
    return ted_rows(where, now, then, reward=reward[1:], terminated=terminated, truncated=truncated)


class _Pixels:
    """Scales and resizes pixels; pixels that another transform has converted to float are only resized."""

    def __init__(self, to_float: bool, size: list[int] | None) -> None:
        self.to_float, self.size = to_float, size

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        for key in _PIXELS:
            if (pixels := rows.get(key, None)) is not None:
                rows.set(key, self._converted(pixels))
        return rows

    def _converted(self, pixels: Tensor) -> Tensor:
        stored = pixels.dtype is torch.uint8
        last = stored and pixels.shape[-1] == 3 and pixels.shape[-3] != 3  # channels last, as in .npz files
        images = pixels.movedim(-1, -3) if last else pixels
        if stored and (self.to_float or self.size is not None):
            images = images / 255
        if self.size is not None and list(images.shape[-2:]) != self.size:
            flat = images.reshape(-1, *images.shape[-3:])
            flat = torch.nn.functional.interpolate(
                flat, self.size, mode="bilinear", align_corners=False, antialias=True
            )
            images = flat.reshape(*images.shape[:-2], *self.size)
        if stored and not self.to_float:
            images = (images * 255).round().clamp(0, 255).to(torch.uint8)
            images = images.movedim(-3, -1) if last else images
        return images.contiguous()
