"""The named checkpointers: another layout of the rows, or another container."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tensordict import NestedKey

from llmrl.data.replay_buffers.checkpointers.base import Encoded, StorageCheckpointerBase
from llmrl.data.replay_buffers.checkpointers.containers import Container, H5Container
from llmrl.data.ted import H5Split, TED2Flat, TED2Nested
from llmrl.errors import DataError

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "TensorStorageCheckpointer",
]


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Rows of any form: those of one form lie together, tensors in raw files."""


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


class _StepsCheckpointer(StorageCheckpointerBase):
    """Steps in TED by a codec, under the name of its layout."""

    _layout: ClassVar[str]
    _codec_class: ClassVar[type[TED2Flat | TED2Nested]]

    def __init__(
        self, done_keys: Sequence[NestedKey] | None = None, reward_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self._codec = self._codec_class(done_keys=done_keys, reward_keys=reward_keys)
        self._warned = False

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        """Rows by the codec, or as they are if they are not TED; the manifest and one warning say so."""
        try:
            encoded = self._codec(content, **where)
        except DataError as error:
            self._warn(f"rows are stored as they are, observations twice: {error}")
            return content, {"name": "rows", "asked": self._layout, "reason": str(error)}
        notes = encoded.get_non_tensor("_ted")
        counts = {name: notes[name] for name in ("trajectories", "ends_without_done", "kept_twice")}
        if counts["ends_without_done"]:
            self._warn(
                f"{counts['ends_without_done']} of {counts['trajectories']} trajectories end without done, or rows are "
                "not in the order of time: the next observation of each end is stored too. Nothing is lost but space."
            )
        elif counts["kept_twice"]:
            self._warn(
                f"the entries {counts['kept_twice']} are stored twice: what 'next' holds is not what follows at the "
                "root. Nothing is lost but space."
            )
        return encoded, {"name": self._layout, **counts}

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{type(self).__name__}: {message}", stacklevel=2)


class FlatStorageCheckpointer(_StepsCheckpointer):
    """Steps in TED with each observation stored once (see `TED2Flat`): up to half the space.

    ``done_keys`` and ``reward_keys`` are the entries of ``"next"`` that are not observations. Rows that do not follow
    each other, or ends that ``done`` does not mark, cost space and are counted in the manifest, but come back
    unchanged; rows that are not TED are stored as they are.
    """

    _layout, _codec_class = "flat", TED2Flat


class NestedStorageCheckpointer(_StepsCheckpointer):
    """The same as nested tensors, one row per trajectory (see `TED2Nested`)."""

    _layout, _codec_class = "nested", TED2Nested


class H5StorageCheckpointer(_StepsCheckpointer):
    """The same in one HDF5 file, a group per trajectory; needs h5py.

    ``checkpoint_file`` is the name of the file; ``h5_kwargs``, for instance ``{"compression": "gzip"}``, goes to h5py's
    ``create_dataset``.
    """

    _layout, _codec_class = "h5", TED2Nested

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
        h5_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(done_keys, reward_keys)
        self.checkpoint_file = checkpoint_file
        self._h5_kwargs = dict(h5_kwargs or {})

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        encoded, layout = super()._encode(content, where)
        return (H5Split()(encoded) if layout["name"] == "h5" else encoded), layout

    @contextmanager
    def _open(self, folder: Path) -> Iterator[tuple[Container, str | None]]:
        with H5Container.open(folder / self.checkpoint_file, "w", self._h5_kwargs) as container:
            yield container, self.checkpoint_file
