"""Containers with ``put`` and ``get`` for the tensors of a checkpoint: raw files, or one HDF5 file.

Names are the keys joined by dots (or slashes); a dot or slash in a key is percent-encoded as in a URL, so that
different keys never share a name. A *reference* is JSON: ``[name, dtype, shape]``, plus the offset in a raw file.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from llmrl.data.replay_buffers.serialization import ITEM, find_dtype
from llmrl.errors import CheckpointError
from llmrl.optional import require

_ALIGNMENT = 16  # offset alignment in bytes, sufficient to map any dtype
_MOST_OPEN_FILES = 128


class FileContainer:
    """One file per key with the elements of its tensors, row-major and little-endian; a list's tensors follow in order.

    ``files`` are the names that may be read. Tensors are memory-mapped; changing one does not change its file.
    """

    def __init__(self, folder: Path, files: Collection[str] = ()) -> None:
        self.folder, self._files = folder, files
        self._names: dict[tuple[str, ...], str] = {}
        self._open: dict[str, Any] = {}
        self._mapped: dict[str, Tensor] = {}

    def put(self, path: Sequence[str], tensor: Tensor) -> Any:
        name = self._names.get(tuple(path))
        if name is None:
            keys = [_escape(key) for key in path if key != ITEM]
            name = self._names[tuple(path)] = _free_name(".".join(keys), self._names.values(), ".memmap")
        if name not in self._open:
            if len(self._open) == _MOST_OPEN_FILES:  # closed files are reopened in append mode if needed
                self.close()
            self._open[name] = (self.folder / name).open("ab")
        file, data = self._open[name], _as_bytes(tensor)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        offset = file.tell()
        file.write(memoryview(data.numpy()))
        return [name, *_describe(tensor), offset]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def get(self, reference: Any) -> Tensor:
        name, dtype, shape, offset = reference
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: a tensor must lie in a file of the checkpoint: got {name!r}.")
        dtype = find_dtype(dtype)
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if name not in self._mapped:
            file = self.folder / name
            self._mapped[name] = torch.from_file(str(file), False, file.stat().st_size, dtype=torch.uint8)
        return self._mapped[name].narrow(0, offset, size).view(dtype).view(shape)


class H5Container:
    """One dataset per tensor in an HDF5 file; ``options`` are arguments of every dataset, such as compression."""

    def __init__(self, file: Any, options: dict[str, Any]) -> None:
        self._file, self._options = file, options
        self._taken: set[str] = set()

    @classmethod
    @contextmanager
    def open(cls, path: Path, mode: str, options: dict[str, Any] | None = None) -> Iterator[H5Container]:
        h5py = require("h5py", extra="h5", used_by="H5StorageCheckpointer")
        with h5py.File(path, mode) as file:
            yield cls(file, options or {})

    def put(self, path: Sequence[str], tensor: Tensor) -> Any:
        keys = [key if key == ITEM else _escape(key) for key in path]
        if ITEM in path:  # an item may be a tensor or contain more: it is always a group, with its tensor in it
            keys.append(ITEM)
        name = _free_name("/".join(keys), self._taken)
        self._taken.add(name)
        tensor = tensor.detach().cpu()
        try:
            array = tensor.numpy()
        except TypeError:  # dtypes that numpy lacks, such as bfloat16
            array = _as_bytes(tensor).numpy()
        options = self._options if array.ndim and array.size else {}  # a scalar cannot be compressed
        if not options and array.nbytes > shutil.disk_usage(Path(self._file.filename).parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)  # HDF5 cannot recover from a full disk
        self._file.create_dataset(name, data=array, **options)
        return [name, *_describe(tensor)]

    def get(self, reference: Any) -> Tensor:
        name, dtype, shape = reference
        data = self._file[name]
        if data.file.filename != self._file.filename or data.external or data.is_virtual:
            raise CheckpointError(f"{self._file.filename}: {name!r} must lie in this file: it is a link to another.")
        return torch.from_numpy(data[()].reshape(-1)).view(find_dtype(dtype)).view(shape)


def _describe(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:
        flat = flat.clone()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _escape(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def _free_name(name: str, taken: Collection[str], suffix: str = "") -> str:
    """The name, shortened for file system limits, and unique also on case-insensitive file systems."""
    head, number, lower = name[:180] or "value", 1, {other.lower() for other in taken}
    candidate = head + suffix
    while candidate.lower() in lower:
        number += 1
        candidate = f"{head}~{number}{suffix}"
    return candidate
