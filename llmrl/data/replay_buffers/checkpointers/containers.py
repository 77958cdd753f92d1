"""Where the tensors of a checkpoint lie: a raw file each, or all in one HDF5 file. What they mean is in ``content.py``.

A *reference* is JSON: the name of the file or dataset, dtype and shape. Names are made of the keys, joined by dots (or
slashes); a dot or slash in a key is percent-encoded as in a URL, so that different keys never share a name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from torch import Tensor

from llmrl.errors import CheckpointError
from llmrl.optional import require

__all__ = ["Container", "FileContainer", "H5Container"]

Reference = dict[str, Any]


class Container(Protocol):
    """Takes tensors by name and gives them back; ``suffix`` says what the bytes are to whoever looks at the files."""

    def put(self, path: Sequence[str], tensor: Tensor, suffix: str = ".memmap") -> Reference: ...

    def get(self, reference: Reference) -> Tensor: ...


class FileContainer:
    """One file per tensor in a folder: its elements in row-major order, little-endian, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: set[str] = set()

    def put(self, path: Sequence[str], tensor: Tensor, suffix: str = ".memmap") -> Reference:
        name = _free_name(".".join(map(_escape, path)) + suffix, self._taken)
        with (self.folder / name).open("wb") as file:
            file.write(memoryview(_as_bytes(tensor).numpy()))
        return {"file": name, **_describe(tensor)}

    def get(self, reference: Reference) -> Tensor:
        """The tensor, read from the file when it is looked at; changing it does not change the file."""
        dtype, shape = _dtype(reference), reference["shape"]
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        path = self.folder / reference["file"]
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(dtype).view(shape)


class H5Container:
    """One dataset per tensor in an HDF5 file; the arguments of every dataset (compression) can be given."""

    def __init__(self, file: Any, options: dict[str, Any]) -> None:
        self._file, self._options = file, options
        self._taken: set[str] = set()

    @classmethod
    @contextmanager
    def open(cls, path: Path, mode: str, options: dict[str, Any] | None = None) -> Iterator[H5Container]:
        h5py = require("h5py", extra="h5", used_by="H5StorageCheckpointer")
        with h5py.File(path, mode) as file:
            yield cls(file, options or {})

    def put(self, path: Sequence[str], tensor: Tensor, suffix: str = ".memmap") -> Reference:
        name = _free_name("/".join(map(_escape, path)), self._taken)
        tensor = tensor.detach().cpu()
        try:
            array = tensor.numpy()
        except TypeError:  # bfloat16 and its like, which numpy does not know
            array = _as_bytes(tensor).numpy()
        options = self._options if array.ndim and array.size else {}  # a scalar cannot be compressed
        if not options and array.nbytes > shutil.disk_usage(Path(self._file.filename).parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)  # HDF5 does not survive a full disk
        self._file.create_dataset(name, data=array, **options)
        return {"dataset": name, **_describe(tensor)}

    def get(self, reference: Reference) -> Tensor:
        tensor = torch.from_numpy(self._file[reference["dataset"]][()].reshape(-1))
        return tensor.view(_dtype(reference)).view(reference["shape"])


def _describe(tensor: Tensor) -> Reference:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _dtype(reference: Reference) -> torch.dtype:
    dtype = getattr(torch, reference["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"a checkpoint holds {reference['dtype']!r}, which this torch ({torch.__version__}) lacks."
        )
    return dtype


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:
        flat = flat.clone()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _escape(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def _free_name(name: str, taken: set[str]) -> str:
    """The name, shortened to what file systems take, and different from others also where case does not count."""
    head, dot, tail = name.rpartition(".") if "/" not in name else (name, "", "")
    head = head[:180] or "value"
    candidate, number = f"{head}{dot}{tail}", 1
    while candidate.lower() in taken:
        number += 1
        candidate = f"{head}~{number}{dot}{tail}"
    taken.add(candidate.lower())
    return candidate
