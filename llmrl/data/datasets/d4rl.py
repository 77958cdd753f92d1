"""D4RL: HDF5 files of observations, actions, rewards, terminals and timeouts, one row per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.d4rl_addresses import ADDRESSES
from llmrl.data.datasets.downloads import RemoteFile
from llmrl.data.datasets.formats import column, following, h5_columns, open_h5, reading, ted_rows
from llmrl.data.replay_buffers import Sampler, Writer
from llmrl.data.ted_utils import expand_right
from llmrl.errors import DataError, UnsupportedError

_PART = 1 << 16  # rows per read


class D4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of D4RL, as in ``"hopper-medium-v2"``, from the published HDF5 file.

    *Rows* ``observation``, ``action``, ``timeouts`` and ``infos`` if the file has them; under ``"next"`` also
    ``observation`` and ``reward``. Terminals are ``("next", "terminated")``, timeouts ``("next", "truncated")``. If
    the file has no ``next_observations``, the next observation is that of the following row, or zeros at the end of an
    episode; then a last row that does not end its episode is left out.

    use_truncated_as_done  False: only ``terminated`` is ``done``
    terminate_on_end       False: steps at a timeout whose next observation is unknown are left out

    ``direct_download=False`` and ``from_env=True``, which use the package d4rl, are not supported. Other arguments are
    those of ``BaseDatasetExperienceReplay``; needs the extra ``h5``.
    """

    kind = "d4rl"
    suffixes = (".hdf5", ".h5")
    addresses = ADDRESSES
    available_datasets: ClassVar[list[str]] = sorted(addresses)
    base_url = "http://rail.eecs.berkeley.edu/datasets/offline_rl"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        download: bool | str = True,
        root: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        if from_env or direct_download is False:
            raise UnsupportedError(
                f"{self._who}: datasets are read from the published files: got from_env={from_env}, direct_download="
                f"{direct_download}; the package d4rl needs gym, which gymnasium has replaced. Leave both out."
            )
        arguments |= {"sampler": sampler, "writer": writer, "collate_fn": collate_fn, "pin_memory": pin_memory}
        arguments |= {"prefetch": prefetch, "transform": transform, "split_trajs": split_trajs, "root": root}
        options = {"use_truncated_as_done": use_truncated_as_done, "drop_timeouts": terminate_on_end is False}
        super().__init__(dataset_id, batch_size, download=download, options=options, **arguments)

    def _remote_files(self) -> list[RemoteFile]:
        address = f"{self.base_url}/{self.addresses[self.dataset_id]}.hdf5"
        return [RemoteFile(address.rpartition("/")[2], address)]

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        for path in files:
            with open_h5(self._who, path) as file:
                columns = h5_columns(file)
                count = _check_lengths(path, columns)
                for start in range(0, count, _PART):
                    stop = min(start + _PART, count)
                    with reading(f"{path}, rows {start} to {stop - 1}"):
                        # One extra row: its observation is the next observation of the last row.
                        part = {key: value[start : stop + 1] for key, value in columns.items() if key[0] != "metadata"}
                    rows = self._rows(str(path), part, stop - start)
                    if len(rows):
                        yield rows, str(path)

    def _rows(self, where: str, columns: dict[tuple[str, ...], np.ndarray], count: int) -> TensorDict:
        """Converts ``count`` rows of the file to TED; the columns have one extra row, except at the end of the file."""
        own = {key: torch.from_numpy(np.ascontiguousarray(value[:count])) for key, value in columns.items()}
        terminals = own[("terminals",)].reshape(-1).to(torch.bool)
        timeouts = own.get(("timeouts",), torch.zeros_like(terminals)).reshape(-1).to(torch.bool)
        ends = terminals | timeouts
        known = ("next_observations",) in own
        if known:
            then = own[("next_observations",)]
        else:
            then = following(columns[("observations",)])[:count]
            then = then.masked_fill(expand_right(ends, then.ndim), 0)
        now = {("observation",): own[("observations",)], ("action",): own[("actions",)]}
        now |= {key: value for key, value in own.items() if key[0] == "infos"}
        if ("timeouts",) in own:
            now[("timeouts",)] = timeouts
        done = ends if self._options["use_truncated_as_done"] else terminals
        flags = {"terminated": terminals, "truncated": timeouts, "done": done}
        rows = ted_rows(where, now, {("observation",): then}, reward=own[("rewards",)], **flags)
        kept = torch.ones_like(ends)
        if not known:  # the last row of the file has no next observation; it is kept only if it ends its episode
            kept[-1] = bool(ends[-1]) or len(columns[("observations",)]) > count
            if self._options["drop_timeouts"]:
                kept &= ~timeouts | terminals
        return rows[kept]


def _check_lengths(path: Path, columns: dict[tuple[str, ...], Any]) -> int:
    count = len(column(str(path), columns, ("rewards",)))
    for name in ("observations", "actions", "terminals"):
        column(str(path), columns, (name,))
    for key, values in columns.items():
        if key[0] != "metadata" and (not values.shape or len(values) != count):
            got = len(values) if values.shape else "one value"
            raise DataError(
                f"{path}: every column must have {count} rows, as the rewards: got {got} of {'.'.join(key)}."
            )
    return count
