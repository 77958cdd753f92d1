"""Helpers for several file formats: rows in TED, errors with the file name, HDF5, archives, safe unpickling."""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from llmrl.data.ragged.tensordicts import column as text_column
from llmrl.errors import DataError, LLMRLError, did_you_mean
from llmrl.optional import require

Key = tuple[str, ...]


def ted_rows(
    where: str,
    now: Mapping[Key, Any],
    then: Mapping[Key, Any],
    *,
    reward: Any,
    terminated: Any,
    truncated: Any,
    done: Any = None,
) -> TensorDict:
    """Transitions as rows of TED.

    Reads    ``now``: entries of the root, [T, ...]; ``then``: entries of ``"next"``, [T, ...]; reward and flags [T] or
             [T, 1]; done defaults to terminated or truncated
    Returns  TensorDict [T] with reward and flags [T, 1]; the flags at the root are False
    Raises   DataError for entries of different lengths, or a reward that is not finite, naming the row

    >>> rows = ted_rows("a.npz", {("observation",): [0.0, 1.0]}, {("observation",): [1.0, 2.0]}, reward=[0.0, 1.0],
    ...                 terminated=[False, True], truncated=[False, False])
    >>> rows["next", "done"].flatten().tolist(), rows["next", "reward"].shape
    ([False, True], torch.Size([2, 1]))
    """
    reward = _as_tensor(reward)
    flags = {"terminated": terminated, "truncated": truncated}
    flags = {name: _as_tensor(flag).to(torch.bool) for name, flag in flags.items()}
    flags["done"] = flags["terminated"] | flags["truncated"] if done is None else _as_tensor(done).to(torch.bool)
    entries = {key: _as_tensor(value) for key, value in now.items()}
    entries |= {("next", *key): _as_tensor(value) for key, value in then.items()}
    entries |= {("next", name): value for name, value in {"reward": reward, **flags}.items()}
    count = len(reward)
    for key, value in entries.items():
        if len(value) != count:
            raise DataError(
                f"{where}: every column must have {count} rows, as the rewards: got {len(value)} of {'.'.join(key)}."
            )
    if reward.dtype.is_floating_point and not bool(reward.isfinite().all()):
        row = int((~reward.isfinite().reshape(count, -1).all(1)).nonzero()[0])
        raise DataError(f"{where}, row {row}: the reward must be a finite number: got {reward[row].tolist()}.")
    rows = TensorDict(batch_size=[count])
    for key, value in entries.items():
        single = key in (("next", "reward"), *(("next", name) for name in flags))
        rows.set(key, value.reshape(count, 1) if single and value.numel() == count else value)
    for name in flags:
        rows.set(name, torch.zeros(count, 1, dtype=torch.bool))
    return rows


def following(values: Any) -> Tensor:
    """The values of the following rows; zeros for the last one."""
    values = _as_tensor(values)
    return torch.cat([values[1:], torch.zeros_like(values[:1])])


def column(where: str, columns: Mapping[Any, Any], key: Any) -> Any:
    """One column. Raises: DataError that lists the existing columns if it is missing."""
    if key not in columns:
        known = sorted(".".join(name) if isinstance(name, tuple) else str(name) for name in columns)
        name = ".".join(key) if isinstance(key, tuple) else str(key)
        raise DataError(
            f"{where}: the file must have the column {name!r}: it has {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return columns[key]


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turns every error of a broken or truncated file into a DataError that names ``where``."""
    try:
        yield
    except LLMRLError:
        raise  # already names the file
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, *_BROKEN) as error:
        raise DataError(
            f"{where}: the file must be complete and valid: {error}; download it again, or check how it was written."
        ) from error


_BROKEN = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError)


# --- HDF5 ---


@contextmanager
def open_h5(who: str, path: Path) -> Iterator[Any]:
    h5py = require("h5py", extra="h5", used_by=who)
    with reading(path), h5py.File(path, "r") as file:
        yield file


def h5_columns(group: Any, path: Key = ()) -> dict[Key, Any]:
    """The datasets of a group and its subgroups, by their keys."""
    columns: dict[Key, Any] = {}
    for name, value in group.items():
        columns |= h5_columns(value, (*path, name)) if hasattr(value, "items") else {(*path, name): value}
    return columns


# --- archives ---


def tar_members(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yields (location for messages, content) for the files in an archive with one of the ``suffixes``.

    Raises   DataError for a truncated archive, even if it ends between two files
    """
    with reading(path), tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(suffixes):
                yield f"{path}, {member.name}", archive.extractfile(member).read()
        if path.suffix == ".tar":  # in a compressed one the decompressor detects truncation
            with path.open("rb") as file:
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError("the archive has no end-of-archive marker")


# --- pickles ---

_HARMLESS = {
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _DataUnpickler(pickle.Unpickler):
    """Unpickles plain Python values and numpy arrays only; other classes could run code from the file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it references {module}.{name}; only plain values and arrays are allowed")
        return super().find_class(module, name)


def load_pickle(content: bytes) -> Any:
    """The value of a pickle. Raises: UnpicklingError if the pickle could run code.

    >>> load_pickle(pickle.dumps({"a": [1, 2]}))
    {'a': [1, 2]}
    """
    return _DataUnpickler(io.BytesIO(content)).load()


def npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of a ``.npy`` file: (shape, is Fortran order, dtype)."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def load_pickled_array(content: bytes) -> Any:
    """Reads a ``numpy.save`` file; returns the Python value itself if it was saved as an array of objects."""
    file = io.BytesIO(content)
    shape, _, dtype = npy_header(file)
    if not dtype.hasobject:
        return np.load(io.BytesIO(content), allow_pickle=False)
    # Not np.load: it would unpickle an array of objects with the unrestricted unpickler.
    value = load_pickle(content[file.tell() :])
    return value.item() if isinstance(value, np.ndarray) and not shape else value


def _as_tensor(value: Any) -> Any:
    if isinstance(value, Tensor | NonTensorStack):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return text_column(value)
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        raise DataError(f"a column must hold numbers: got values of type {array.dtype}.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)  # torch supports hardly any operations on them
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
