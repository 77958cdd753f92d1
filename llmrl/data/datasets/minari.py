"""Minari datasets, read with the package `minari` in both of its formats, HDF5 and Arrow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.concurrency.environment import environment
from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import note_files
from llmrl.data.datasets.formats import reading, ted_rows
from llmrl.errors import ConfigError, DataError
from llmrl.optional import require

Key = tuple[str, ...]


class _RemoteNames:
    def __get__(self, instance: Any, owner: type) -> list[str]:
        with _asking_the_server(owner.__name__):
            return sorted(_minari(owner.__name__).list_remote_datasets())


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of Minari, as in ``"D4RL/door/human-v2"``.

    *Rows* ``observation`` and ``action`` (nested like their spaces; parts of a tuple are named "0", "1", ...),
    ``info``, ``episode``; under ``"next"`` also ``observation``, ``info`` and ``reward``. An info that the environment
    did not return at reset is only under ``"next"``. Texts stay str.

    A local source is the folder of a dataset, which has ``data/metadata.json``; ``load_from_local_minari`` reads it
    from Minari's own folder (``MINARI_DATASETS_PATH``). Other arguments are those of ``BaseDatasetExperienceReplay``;
    needs the extra ``minari``.
    """

    kind = "minari"
    suffixes = ("metadata.json", "main_data.hdf5", ".arrow")
    available_datasets = _RemoteNames()

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        load_from_local_minari: bool = False,
        source: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        if load_from_local_minari:
            if source is not None:
                raise ConfigError(f"{self._who}: source must be left out with load_from_local_minari: got {source}.")
            base = os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
            source = Path(base) / dataset_id
        super().__init__(dataset_id, batch_size, source=source, **arguments)

    def _download(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with environment("MINARI_DATASETS_PATH", str(folder)), _asking_the_server(self._who):
                _minari(self._who).download_dataset(self.dataset_id, force_download=True)
        finally:
            files = note_files(folder)
        return files

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        # In the Arrow format each episode has its own metadata.json too.
        about = {path.parent / "metadata.json" for path in files}
        found = sorted(path for path in about if path.exists() and "total_episodes" in json.loads(path.read_text()))
        folders = [path.parent for path in found]
        if len(folders) != 1:
            raise DataError(
                f"{self._who}: the files must be one dataset of Minari, a folder with metadata.json and its episodes: "
                f"found {len(folders)} among {[str(path) for path in files[:3]]}."
            )
        with reading(folders[0]):
            dataset = _minari(self._who).MinariDataset(folders[0])
            notes["metadata"] = json.loads(json.dumps(dataset.storage.metadata, default=str))
            episodes = iter(dataset.iterate_episodes())
        for number in count():
            where = f"{folders[0]}, episode {number}"
            with reading(where):
                episode = next(episodes, None)
            if episode is None:
                return
            yield _rows(where, episode), where


def _rows(where: str, episode: Any) -> TensorDict:
    steps = len(episode.rewards)
    now: dict[Key, Any] = {}
    then: dict[Key, Any] = {}
    for key, values in [*_flat(episode.observations, ("observation",)), *_flat(episode.infos or {}, ("info",))]:
        if len(values) == steps + 1:
            now[key], then[key] = values[:-1], values[1:]
        elif key[0] == "info" and len(values) == steps:  # the environment returns it from step only, not from reset
            then[key] = values
        else:
            raise DataError(
                f"{where}: {'.'.join(key)} must have {steps + 1} values, one more than rewards: got {len(values)}."
            )
    now |= dict(_flat(episode.actions, ("action",)))
    flags = {"terminated": episode.terminations, "truncated": episode.truncations}
    rows = ted_rows(where, now, then, reward=episode.rewards, **flags)
    return rows.set("episode", torch.full([steps], int(episode.id)))


def _flat(value: Any, key: Key) -> list[tuple[Key, Any]]:
    if isinstance(value, tuple):
        value = {str(number): part for number, part in enumerate(value)}
    if isinstance(value, Mapping):
        return [entry for name, part in value.items() for entry in _flat(part, (*key, name))]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        value = [text.decode() if isinstance(text, bytes) else text for text in value.tolist()]
    return [(key, value)]


@contextmanager
def _asking_the_server(who: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise  # names the missing package for the server
    except Exception as error:  # Minari's server backends raise different errors
        raise DataError(
            f"{who}: Minari's server must answer: {type(error).__name__}: {error}; check the connection, or give "
            "source=..., a Minari dataset folder."
        ) from error


def _minari(who: str) -> Any:
    return require("minari", extra="minari", used_by=who)
