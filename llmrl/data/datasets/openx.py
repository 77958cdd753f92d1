"""Open X-Embodiment: robot episodes as RLDS steps, pickled in tar archives; hub: jxu124/OpenX-Embodiment."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import fetch
from llmrl.data.datasets.formats import column, following, load_pickle, reading, tar_members, ted_rows
from llmrl.data.datasets.streaming import StreamSampler, TrajectoryStream, cut
from llmrl.data.replay_buffers import Sampler, SliceSampler, SliceSamplerWithoutReplacement
from llmrl.errors import ConfigError, DataError
from llmrl.optional import require

Key = tuple[str, ...]

_CONVERTED = """stanford_kuka_multimodal_dataset nyu_rot_dataset stanford_hydra_dataset austin_buds_dataset
nyu_franka_play_dataset maniskill_dataset furniture_bench_dataset cmu_franka_exploration_dataset ucsd_kitchen_dataset
ucsd_pick_and_place_dataset austin_sailor_dataset austin_sirius_dataset usc_cloth_sim utokyo_pr2_opening_fridge
utokyo_pr2_tabletop_manipulation utokyo_saytap utokyo_xarm_pick_and_place utokyo_xarm_bimanual berkeley_mvp berkeley_rpt
kaist_nonprehensile stanford_mask_vit tokyo_u_lsmo dlr_sara_pour dlr_sara_grid_clamp dlr_edan_shared_control
asu_table_top stanford_robocook iamlab_cmu_pickup_insert"""
_PLAIN = """fractal20220817_data kuka bridge taco_play
jaco_play berkeley_cable_routing roboturk nyu_door_opening_surprising_effectiveness viola berkeley_autolab_ur5 toto
language_table columbia_cairlab_pusht_real bc_z robo_net eth_agent_affordances imperialcollege_sawyer_wrist_cam
uiuc_d3field utaustin_mutex berkeley_fanuc_manipulation cmu_playing_with_food cmu_play_fusion cmu_stretch
berkeley_gnm_recon berkeley_gnm_cory_hall berkeley_gnm_sac_son"""
_FLAGS = ("is_first", "is_last", "is_terminal", "reward")


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """Episodes of real robots, as in ``"cmu_stretch"``.

    *Rows* ``observation`` (nested, images uint8[3, H, W]), ``action``, ``is_init``, ``episode``, and other entries of
    the steps (``discount``, texts as ``language_instruction``); under ``"next"`` also ``observation`` and ``reward``.
    The files lack the observation after the last step of an episode: it is zeros.

    num_slices, slice_len  one of them makes the sampler a ``SliceSampler``, with ``strict_length`` and ``shuffle``
    replacement            False: each trajectory once per pass; needed for ``shuffle=False``
    streaming              True: nothing is stored; each slice is from the next trajectory of the files, which are
                           downloaded one at a time. ``pad`` is the fill value for short trajectories (True: 0)

    Without ``batch_size``, iterating gives one trajectory at a time, or one slice of each with ``slice_len``. Other
    arguments are those of ``BaseDatasetExperienceReplay``; encoded images need the extra ``vision``. Pickles are read
    only if they hold plain values and arrays.
    """

    kind = "openx"
    suffixes = (".tar",)
    available_datasets: ClassVar[list[str]] = sorted(
        [*_PLAIN.split(), *(f"{name}_converted_externally_to_rlds" for name in _CONVERTED.split())]
    )
    repository = "jxu124/OpenX-Embodiment"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | bool | None = None,
        replacement: bool | None = None,
        streaming: bool = False,
        sampler: Sampler | None = None,
        strict_length: bool = True,
        **arguments: Any,
    ) -> None:
        self.streaming, self.shuffle, self.slice_len = streaming, shuffle, slice_len
        self._stream = {"shuffle": shuffle, "num_slices": num_slices, "slice_len": slice_len}
        self._stream["pad"] = 0 if pad is True else None if pad is False else pad
        sliced = num_slices is not None or slice_len is not None
        self._check(sliced, replacement, sampler, arguments.get("split_trajs", False))
        if streaming:
            sampler = StreamSampler()
        elif sliced:
            slices = {"num_slices": num_slices, "slice_len": slice_len, "strict_length": strict_length}
            without = replacement is False
            sampler = SliceSamplerWithoutReplacement(**slices, shuffle=shuffle) if without else SliceSampler(**slices)
        super().__init__(dataset_id, batch_size, sampler=sampler, **arguments)

    def _check(self, sliced: bool, replacement: bool | None, sampler: Sampler | None, split: bool) -> None:
        own, stream = self._stream, self.streaming
        wrong = {
            "give num_slices or slice_len, not both": own["num_slices"] is not None and own["slice_len"] is not None,
            "num_slices and slice_len define the sampler; leave sampler out": sliced and sampler is not None,
            "shuffle=False requires replacement=False": not (self.shuffle or stream or replacement is False),
            "pad requires streaming=True": own["pad"] is not None and not stream,
            "streaming=True does not support sampler, replacement=True or split_trajs=True": stream
            and bool(sampler or replacement or split),
        }
        for what, is_so in wrong.items():
            if is_so:
                raise ConfigError(f"{self._who}: the arguments must fit each other: {what}.")

    def _open(self, download: bool | str) -> Any:
        if not self.streaming:
            return super()._open(download)
        self._files_here(bool(download))
        return TrajectoryStream(self._who, self._pass, **self._stream)

    def _pass(self) -> Iterator[TensorDict]:
        """Yields the trajectories of all files; removes a downloaded file after its last trajectory."""
        files: list[Any] = self._local_files()
        if not files:
            self._check_name()
            files = self._remote_files()
        for file in (files[number] for number in self._order(len(files))):
            # Not a TemporaryDirectory, which warns if the caller abandons the stream before its end.
            folder = None if isinstance(file, Path) else Path(mkdtemp(prefix="llmrl-stream-"))
            try:
                paths = [file] if folder is None else fetch(self._who, [file], folder)
                yield from (rows for rows, _ in self._read(paths, {}))
            finally:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)

    def _order(self, count: int) -> list[int]:
        return torch.randperm(count).tolist() if self.shuffle else list(range(count))

    def __iter__(self) -> Iterator[Any]:
        if self.batch_size is not None:
            yield from super().__iter__()
        elif self.streaming:
            yield from map(self._transformed, self._storage.trajectories())
        else:
            ends = self._storage.entry(("next", "done"), torch.arange(len(self))).reshape(-1).nonzero().reshape(-1)
            starts = [0, *(ends[:-1] + 1).tolist()]
            for number in self._order(len(ends)):
                rows = self._storage.get(slice(starts[number], int(ends[number]) + 1))
                if self.slice_len is not None:
                    rows = cut(self._who, rows, self.slice_len, None)
                yield self._transformed(rows)

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        for number, (where, steps) in enumerate(episode for path in files for episode in _episodes(path)):
            rows = _rows(self._who, where, steps)
            yield rows.set("episode", torch.full([len(rows)], number, dtype=torch.int32)), where


def _episodes(path: Path) -> Iterator[tuple[str, list[Any]]]:
    for where, content in tar_members(path, (".pickle",)):
        with reading(where):
            episode = load_pickle(content)
        steps = episode.get("steps") if isinstance(episode, dict) else None
        if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
            raise DataError(f"{where}: an episode must have 'steps', a list of dicts: got a {type(episode).__name__}.")
        yield where, steps


def _rows(who: str, where: str, steps: list[dict[str, Any]]) -> TensorDict:
    flat = [dict(_flat(who, step)) for step in steps]
    for number, step in enumerate(flat):
        if step.keys() != flat[0].keys():
            odd = sorted(".".join(name) for name in step.keys() ^ flat[0].keys())
            raise DataError(f"{where}, step {number}: every step must have the same entries: {', '.join(odd)}.")
    columns: dict[Key, Any] = {}
    for key in flat[0]:
        values = [step[key] for step in flat]
        with reading(f"{where}, {'.'.join(key)}"):
            if not isinstance(values[0], str):
                values = torch.stack([torch.as_tensor(np.array(value)) for value in values])
        columns[key] = values
    flags = {name: column(where, columns, (name,)) for name in _FLAGS}
    now = {key: values for key, values in columns.items() if key[0] not in _FLAGS}
    now[("is_init",)] = flags["is_first"].to(torch.bool)
    then = {
        key: following(values) for key, values in now.items() if key[0] == "observation" and torch.is_tensor(values)
    }
    last, terminal = flags["is_last"].to(torch.bool), flags["is_terminal"].to(torch.bool)
    last[-1] = True  # even if the file says False: no step follows
    return ted_rows(where, now, then, reward=flags["reward"], terminated=terminal, truncated=last & ~terminal)


def _flat(who: str, value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yields the entries of a step: encoded images as uint8[3, H, W], texts as str; skips entries that are None."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        image = require("PIL.Image", extra="vision", used_by=who).open(io.BytesIO(value["bytes"]))
        yield key, np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(who, part, (*key, str(name)))
    elif isinstance(value, bytes):
        yield key, value.decode()
    elif value is not None:
        yield key, value
