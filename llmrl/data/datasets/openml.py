"""OpenML: supervised learning tables from ARFF files, for contextual bandits."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from llmrl.data.datasets.base import BaseDatasetExperienceReplay
from llmrl.data.datasets.downloads import RemoteFile, open_url
from llmrl.data.datasets.formats import column, reading
from llmrl.data.replay_buffers import Sampler, SamplerWithoutReplacement, Writer
from llmrl.errors import DataError
from llmrl.text_files import why_not_text

_NUMERIC = ("numeric", "real", "integer")
_ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.IGNORECASE)


class _Table(NamedTuple):
    """An OpenML dataset: its OpenML id, the target column (None: the last one), and whether to one-hot encode
    categories and drop rows with missing values."""

    number: int
    target: str | None = None
    one_hot: bool = False
    drop_missing: bool = False


class OpenMLExperienceReplay(BaseDatasetExperienceReplay):
    """A table of OpenML: ``X`` float32[features]; ``y`` int64, the index of the class among the sorted class names.

    Columns are scaled to mean 0 and variance 1. Categories are indices in the order of their names, scaled too
    (``adult_num``, ``mushroom_num``), or one-hot columns after the numeric ones (``..._onehot``). The target of
    ``adult`` is the occupation; the income class and rows with missing values are dropped. The default
    sampler is ``SamplerWithoutReplacement``. Other arguments are those of ``BaseDatasetExperienceReplay``.

    ``max_outcome_val`` is the largest ``y``. A local source is an ARFF file.
    """

    kind = "openml"
    suffixes = (".arff",)
    tables: ClassVar[dict[str, _Table]] = {
        "adult_num": _Table(179, "occupation", drop_missing=True),
        "adult_onehot": _Table(179, "occupation", one_hot=True, drop_missing=True),
        "mushroom_num": _Table(24, "class"),
        "mushroom_onehot": _Table(24, "class", one_hot=True),
        "covertype": _Table(1596),
        "shuttle": _Table(40685),
        "magic": _Table(1120),
    }
    available_datasets: ClassVar[list[str]] = list(tables)
    base_url = "https://www.openml.org/api/v1/json/data"

    def __init__(
        self,
        name: str,
        batch_size: int | None = None,
        root: str | Path | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        **arguments: Any,
    ) -> None:
        arguments |= {"writer": writer, "collate_fn": collate_fn, "pin_memory": pin_memory, "prefetch": prefetch}
        sampler = SamplerWithoutReplacement() if sampler is None else sampler
        super().__init__(name, batch_size, root=root, sampler=sampler, transform=transform, **arguments)
        self.max_outcome_val = self.metadata["classes"] - 1

    def _remote_files(self) -> list[RemoteFile]:
        number = self.tables[self.dataset_id].number
        page = open_url(self._who, f"{self.base_url}/{number}")
        with reading(f"{self.base_url}/{number}"):
            about = json.loads(page)["data_set_description"]
            checksum = about.get("md5_checksum")
            return [RemoteFile(f"{number}.arff", about["url"], checksum and f"md5:{checksum}")]

    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDict, str]]:
        if len(files) != 1:
            raise DataError(f"{self._who}: a dataset is one ARFF file: got {[str(file) for file in files]}.")
        path = files[0]
        table = self.tables.get(self.dataset_id, _Table(0))
        types, rows = _read_arff(path)
        if table.drop_missing:
            rows = [row for row in rows if "?" not in row]
        if not rows:
            raise DataError(f"{path}: the file must have rows of data: it has none.")
        columns = dict(zip(types, zip(*rows, strict=True), strict=True))
        target = table.target or next(reversed(types))
        classes, y = np.unique(column(str(path), columns, target), return_inverse=True)
        columns = {name: values for name, values in columns.items() if name != target}
        if self.dataset_id.startswith("adult"):
            columns.pop("class", None)
        numbers, categories = [], []
        for name, values in columns.items():
            if types[name] in _NUMERIC:
                numbers.append(np.array([float("nan") if value == "?" else float(value) for value in values]))
            else:
                numbered = np.unique(values, return_inverse=True)[1]
                (categories if table.one_hot else numbers).append(numbered)
        scaled = [_scaled(str(path), np.stack(numbers, 1))] if numbers else []
        one_hot = [np.eye(numbered.max() + 1)[numbered] for numbered in categories]
        features = torch.from_numpy(np.concatenate([*scaled, *one_hot], 1)).to(torch.float32)
        notes["metadata"] = {"classes": len(classes), "names": [str(name) for name in classes]}
        yield TensorDict({"X": features, "y": torch.from_numpy(y)}, batch_size=[len(features)]), str(path)


def _scaled(where: str, values: np.ndarray) -> np.ndarray:
    if np.isnan(values).any():
        row, number = np.argwhere(np.isnan(values))[0]
        raise DataError(f"{where}: no numeric value may be missing: row {row} has none in feature {number}.")
    spread = values.std(0)
    return (values - values.mean(0)) / np.where(spread == 0, 1, spread)  # a constant column becomes zeros


def _read_arff(path: Path) -> tuple[dict[str, str], list[list[str]]]:
    """The type of every attribute, in file order, and the rows as strings; "?" is a missing value."""
    types: dict[str, str] = {}
    with reading(path):
        if reason := why_not_text(path):
            raise DataError(reason)
        with path.open(encoding="utf-8-sig") as file:
            lines = enumerate(file, 1)
            for _, line in lines:
                if line.strip().lower() == "@data":
                    break
                if match := _ATTRIBUTE.match(line.strip()):
                    kind = match[2].strip()
                    types[match[1].strip("'\"")] = "category" if kind.startswith("{") else kind.lower()
            kept = ((number, line) for number, line in lines if line.strip() and line[0] != "%")
            rows = [_arff_row(f"{path}, line {number}", line, types) for number, line in kept]
    if not types:
        raise DataError(f"{path}: an ARFF file must have lines '@attribute name type': it has none.")
    return types, rows


def _arff_row(where: str, line: str, types: dict[str, str]) -> list[str]:
    if line.startswith("{"):
        raise DataError(f"{where}: rows must list every value: got a sparse row, {line.strip()!r:.60}.")
    quote = '"' if '"' in line else "'"  # ARFF allows both quotes, the csv module one at a time
    row = [value.strip() for value in next(csv.reader([line], quotechar=quote, escapechar="\\", skipinitialspace=True))]
    if len(row) != len(types):
        raise DataError(f"{where}: a row must have {len(types)} values, one per attribute: got {len(row)}.")
    for (name, kind), value in zip(types.items(), row, strict=True):
        if kind in _NUMERIC and value != "?":
            try:
                float(value)
            except ValueError:
                raise DataError(f"{where}: {name!r} must be a number: got {value!r}.") from None
    return row
