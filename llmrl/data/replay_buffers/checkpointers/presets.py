"""The named checkpointers: the same writer with another layout of the rows, or another container."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict import NestedKey

from llmrl.data.replay_buffers.checkpointers.base import Encoded, StorageCheckpointerBase
from llmrl.data.replay_buffers.checkpointers.containers import Container, H5Container
from llmrl.data.ted import H5Split, TED2Flat, TED2Nested

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "TensorStorageCheckpointer",
]


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Any Python objects: rows of one form lie together, tensors in raw files, what JSON cannot hold in pickles."""


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Rows as they are, a raw memory-mappable file per entry.

    >>> import tempfile, torch
    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> storage, other = LazyTensorStorage(10), LazyTensorStorage(10)
    >>> storage.set(slice(0, 3), torch.arange(3))
    >>> with tempfile.TemporaryDirectory() as path:
    ...     TensorStorageCheckpointer().dumps(storage, path)
    ...     TensorStorageCheckpointer().loads(other, path)
    >>> other[:]
    tensor([0, 1, 2])
    """


class FlatStorageCheckpointer(StorageCheckpointerBase):
    """Steps in TED with each observation stored once (see `TED2Flat`): up to half the space.

    ``done_keys`` and ``reward_keys`` are the entries of ``"next"`` that are no observations. Rows that do not follow
    each other, or ends that ``done`` does not mark, cost space and are counted in the manifest, but come back
    unchanged; rows that are no TED are stored as they are.
    """

    def __init__(
        self, done_keys: Sequence[NestedKey] | None = None, reward_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self._codec = TED2Flat(done_keys=done_keys, reward_keys=reward_keys)

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        return self._encode_ted("flat", self._codec, content, where)


class NestedStorageCheckpointer(StorageCheckpointerBase):
    """The same as nested tensors, one row per trajectory (see `TED2Nested`)."""

    def __init__(
        self, done_keys: Sequence[NestedKey] | None = None, reward_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self._codec = TED2Nested(done_keys=done_keys, reward_keys=reward_keys)

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        return self._encode_ted("nested", self._codec, content, where)


class H5StorageCheckpointer(StorageCheckpointerBase):
    """The same in one HDF5 file, a group per trajectory; needs h5py.

    ``checkpoint_file`` is the name of the file; ``h5_kwargs``, for instance ``{"compression": "gzip"}``, goes to h5py's
    ``create_dataset``.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
        h5_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_file = checkpoint_file
        self._h5_kwargs = dict(h5_kwargs or {})
        self._codec = TED2Nested(done_keys=done_keys, reward_keys=reward_keys)

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        return self._encode_ted("h5", lambda td, **ring: H5Split()(self._codec(td, **ring)), content, where)

    @contextmanager
    def _open(self, folder: Path) -> Iterator[tuple[Container, str | None]]:
        with H5Container.open(folder / self.checkpoint_file, "w", self._h5_kwargs) as container:
            yield container, self.checkpoint_file
