"""RoboSet (sim): HDF5 files of trials, on the hub as jdvakil/RoboSet_Sim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.formats import column, following, h5_columns, open_h5, reading, ted_rows
from llmrl.errors import DataError

_TASKS = ("MicroOpenRandom", "Knob2OffRandom", "LdoorOpenRandom", "SdoorOpenRandom", "Knob1OnRandom")


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """Demonstrations and rollouts of robot arms, one file per seed, one group (``Trial0``, ...) per episode.

    *Rows* ``observation``, ``action``, ``time``, ``info`` (the ``env_infos``), ``episode`` and ``seed`` (the position
    of the file); under ``"next"`` also ``observation``, ``info`` and ``reward``. The file has no observation after the
    last step of a trial: it is zeros. A trial that does not end in ``done`` is truncated at its last step.
    Other arguments are those of ``BaseDatasetExperienceReplay``; needs the extra ``h5``.
    """

    kind = "roboset"
    suffixes = (".h5", ".hdf5")
    available_datasets: ClassVar[list[str]] = [
        *(
            f"DAPG({who})/{task}_v2d-v1"
            for who in ("expert", "human")
            for task in ("door", "relocate", "hammer", "pen")
        ),
        *(f"FK1-v4(expert)/FK1_{task}_v2d-v4" for task in _TASKS),
        "FK1-v4(human)/human_demos_by_playdata",
        "FK1-v4(human)/human_demos_by_task/human_demo_singleTask_Fixed-v4",
        *(f"FK1-v4(human)/human_demos_by_task/FK1_{task}_v2d-v4" for task in _TASKS),
    ]
    repository = "jdvakil/RoboSet_Sim"

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        for seed, path in enumerate(files):
            with open_h5(self._who, path) as file:
                trials = [name for name in file if name.removeprefix("Trial").isdecimal()]
                if not trials:
                    raise DataError(f"{path}: the file must have groups Trial0, ...: it has {sorted(file)[:5]}.")
                for name in sorted(trials, key=lambda name: int(name.removeprefix("Trial"))):
                    where = f"{path}, {name}"
                    with reading(where):
                        columns = {key: value[()] for key, value in h5_columns(file[name]).items()}
                    rows = _trial(where, columns)
                    rows.set("episode", torch.full([len(rows)], int(name.removeprefix("Trial"))))
                    yield rows.set("seed", torch.full([len(rows)], seed)), where


def _trial(where: str, columns: dict[tuple[str, ...], np.ndarray]) -> TensorDict:
    names = {"observations": "observation", "actions": "action", "env_infos": "info"}
    ends = np.asarray(column(where, columns, ("done",))).reshape(-1).astype(bool)
    cut = np.zeros_like(ends)
    cut[-1:] = ~ends[-1:]
    now, then = {}, {}
    for name in ("observations", "actions"):
        column(where, columns, (name,))  # raises an error if the column is missing; all columns are copied below
    for key, values in columns.items():
        if key[0] not in ("rewards", "done"):
            now[(names.get(key[0], key[0]), *key[1:])] = values
        if key[0] in ("observations", "env_infos"):
            then[(names[key[0]], *key[1:])] = following(values)
    return ted_rows(where, now, then, reward=column(where, columns, ("rewards",)), terminated=ends, truncated=cut)
