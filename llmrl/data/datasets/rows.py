"""Rows of a dataset in a folder: one file per entry, written batch by batch, memory-mapped for reading.

    dataset.json        written last: the entries, the number of rows, the size of every file, and the notes
    column_0.bin        the values of one entry, row after row

Text is stored as one int64 per row, an index into the list of distinct texts in `dataset.json`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column as text_column
from llmrl.data.replay_buffers import TensorStorage
from llmrl.data.ted_utils import as_key, expand_right, leaf_keys
from llmrl.errors import DataError

MARKER = "dataset.json"
_FORMAT = 1

Key = tuple[str, ...]


class _Column(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size  # of one row
    text: bool
    file: BinaryIO


class RowWriter:
    """Appends batches to the files of a folder; a context manager that closes them.

    The first batch sets the entries, their dtypes and their shapes.

    Raises   DataError for a batch with other entries, naming its ``source`` and the entry
    """

    def __init__(self, who: str, folder: Path) -> None:
        self.who, self.folder, self.rows = who, folder, 0
        self._files = ExitStack()  # closes every file, even if closing one fails on a full disk
        self._columns: dict[Key, _Column] = {}
        self._inside: torch.Size | None = None  # batch size of one row
        self._texts: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def write(self, rows: TensorDictBase, source: str) -> None:
        entries = {key: self._values(rows.get(key), len(rows), source, key) for key in leaf_keys(rows)}
        if not self._columns:
            self._inside = rows.batch_size[1:]
            for number, (key, (values, text)) in enumerate(entries.items()):
                file = self._files.enter_context((self.folder / f"column_{number}.bin").open("wb"))
                self._columns[key] = _Column(values.dtype, values.shape[1:], text, file)
        if entries.keys() != self._columns.keys():
            odd = sorted(entries.keys() ^ self._columns.keys())
            raise DataError(
                f"{self.who}: every part must have the same entries: {source} differs from the first in {odd}."
            )
        for key, (values, _) in entries.items():
            column = self._columns[key]
            if (values.dtype, values.shape[1:]) != (column.dtype, column.shape):
                raise DataError(
                    f"{self.who}: an entry must have one dtype and one shape per row: got {values.dtype} "
                    f"{list(values.shape[1:])} for {'.'.join(key)} in {source}, expected {column.dtype} "
                    f"{list(column.shape)}."
                )
            content = values.clone(memory_format=torch.contiguous_format)  # a single element may have any stride
            # Not with numpy's tofile, which hides short writes on a full disk.
            column.file.write(content.reshape(-1).view(torch.uint8).numpy().data)
        self.rows += len(rows)

    def complete(self, notes: dict[str, Any]) -> None:
        """Completes the folder. Raises: DataError if nothing was written."""
        if not self.rows:
            raise DataError(f"{self.who}: a dataset must have at least one row: the files have none.")
        self._files.close()  # before the marker, which guarantees that all rows are in the files
        columns = []
        for key, column in self._columns.items():
            dtype = str(column.dtype).removeprefix("torch.")
            entry = {"key": key, "dtype": dtype, "shape": list(column.shape), "text": column.text}
            columns.append({**entry, "bytes": self.rows * prod(column.shape) * column.dtype.itemsize})
        content = {"format": _FORMAT, "rows": self.rows, "inside": list(self._inside), "columns": columns}
        content |= {"texts": list(self._texts), "notes": notes}
        (self.folder / MARKER).write_text(json.dumps(content, indent=1))

    def _values(self, value: Any, count: int, source: str, key: Key) -> tuple[Tensor, bool]:
        if isinstance(value, Tensor):
            return value.detach().cpu(), False
        texts = [value.data] * count if isinstance(value, NonTensorData) else value.tolist()
        return torch.tensor([self._number(text, f"{'.'.join(key)} in {source}") for text in texts]), True

    def _number(self, text: Any, where: str) -> Any:
        if isinstance(text, list):  # the steps of a trajectory
            return [self._number(each, where) for each in text]
        if not isinstance(text, str):
            raise DataError(f"{self.who}: an entry must be tensors or text: got a {type(text).__name__} as {where}.")
        return self._texts.setdefault(text, len(self._texts))


class DatasetStorage(TensorStorage):
    """The rows of a folder written by `RowWriter`. Writes stay in the memory of this process.

    ``notes["following"]`` are entries whose ``"next"`` is not stored: it is read from the following row, or is zeros
    where ``("next", "done")`` ends the trajectory.

    Raises   DataError if a file of the folder is missing or its size differs from the recorded one
    """

    def __init__(self, who: str, folder: Path) -> None:
        content = read_marker(who, folder)
        count, self.notes = content["rows"], content["notes"]
        rows = TensorDict(batch_size=[count, *content["inside"]])
        texts = content["texts"]
        self._texts: dict[Key, list[str]] = {}
        self._following = [as_key(key) for key in self.notes.get("following", [])]
        for number, column in enumerate(content["columns"]):
            file, key = folder / f"column_{number}.bin", tuple(column["key"])
            size = file.stat().st_size if file.exists() else None
            if size != column["bytes"]:
                raise DataError(
                    f"{who}: the dataset is damaged: {file} must have {column['bytes']} bytes: "
                    f"{'it is missing' if size is None else f'got {size}'}; rebuild it with download='force'."
                )
            if column["text"]:
                self._texts[key] = texts
            rows.set(key, _mapped(file, getattr(torch, column["dtype"]), (count, *column["shape"])))
        super().__init__(rows)

    def batch(self, index: int | slice | Tensor) -> Any:
        rows = super().batch(index)
        for key in self._following:
            rows.set(("next", *key), self._next(key, index, rows))
        for key, texts in self._texts.items():
            rows.set(key, _as_text(rows.get(key), texts))
        return rows

    def entry(self, key: Any, index: Tensor) -> Any:
        path = as_key(key)
        if path in self._texts or (path[:1] == ("next",) and path[1:] in self._following):
            return self.batch(index).get(path)
        return super().entry(key, index)

    def _next(self, key: Key, index: int | slice | Tensor, rows: Any) -> Tensor:
        at = torch.arange(index.start, index.stop) if isinstance(index, slice) else torch.as_tensor(index)
        last = len(self) - 1  # has no following row: zeros, as at the end of a trajectory
        values = super().entry(key, (at + 1).clamp(max=last).reshape(-1)).reshape(rows.get(key).shape)
        ends = rows.get(("next", "done")).reshape(at.shape) | (at == last)
        return values.masked_fill(expand_right(ends, values.ndim), 0)


def read_marker(who: str, folder: Path) -> dict[str, Any]:
    """Reads the description of the rows. Raises: DataError if the folder is not a dataset of this format."""
    try:
        content = json.loads((folder / MARKER).read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, expected {_FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{who}: {folder} must be a dataset that llmrl has written: {error!r}; rebuild it with download='force'."
        ) from error
    return content


def _mapped(file: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not prod(shape):
        return torch.zeros(shape, dtype=dtype)
    # Not shared (copy-on-write): writes to the rows never reach the file.
    return torch.from_file(str(file), shared=False, size=prod(shape), dtype=dtype).view(shape)


def _as_text(numbers: Tensor, texts: list[str]) -> Any:
    if not numbers.ndim:
        return NonTensorData(texts[int(numbers)])
    if numbers.ndim == 1:
        return text_column([texts[number] for number in numbers.tolist()])
    return NonTensorStack(*[_as_text(number, texts) for number in numbers])
