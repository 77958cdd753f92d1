"""The checkpointer: writes the rows and counters of a storage to a directory, and reads them back.

    dumps   storage.snapshot() -> save hooks -> layout -> files, manifest -> one atomic step (``directory.py``)
    loads   manifest, checksums -> files -> layout -> load hooks -> storage.restore()

A checkpoint records its layout and container, so every checkpointer can read the checkpoints of all others; the classes
differ only in what they write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from tensordict import NestedKey

from llmrl.data.replay_buffers.checkpointers.containers import FileContainer, H5Container
from llmrl.data.replay_buffers.directory import (
    read_manifest,
    read_object,
    reading_directory,
    replace_directory,
    write_manifest,
    write_object,
)
from llmrl.data.replay_buffers.serialization import decode, encode, encode_rows
from llmrl.data.replay_buffers.storages import Storage, StorageEnsemble, TensorStorage
from llmrl.data.replay_buffers.utils import transform_states
from llmrl.data.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from llmrl.errors import CheckpointError, DataError, UnsupportedError

FORMAT, FORMAT_VERSION = "llmrl.storage", 3
_ENSEMBLE_FORMAT, _ENSEMBLE_VERSION = "llmrl.storage_ensemble", 2
_TRANSFORMS = "transforms.pt"

Hook = Callable[[Any], Any]
Encoded = tuple[Any, dict[str, Any]]

_DECODERS: dict[str, Hook] = {
    "rows": lambda content: content,
    "flat": Flat2TED(),
    "nested": Nested2TED(),
    "h5": lambda content: Nested2TED()(H5Combine()(content)),
}


class StorageCheckpointerBase:
    """Writes rows unchanged, one raw file per entry, and a manifest with the layout and a checksum of every file.

    Only rows that were written are saved, and equal rows give equal files. A path can be written repeatedly, even if it
    contains the storage's own memory-mapped files; a kill at any moment leaves the old checkpoint or the new one.
    Loading runs no code from the checkpoint: ``dumps`` raises for objects that could only be read by running code.

    Subclasses override ``_encode`` for another layout of the rows and ``_open`` for another container.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Adds a hook: ``hook(content)`` returns the content to write; the codecs of `llmrl.data.ted` are hooks.

        If ``hook.takes_counters`` is True, it is called as ``hook(content, shift=, is_full=)``; the oldest row is at
        ``shift``.
        """
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Adds a hook: ``hook(content)`` returns the rows to restore from the content that was written."""
        self._load_hooks.append(hook)

    def dumps(self, storage: Storage, path: str | Path) -> None:
        """Writes the rows and counters of ``storage`` to the directory ``path``.

        Raises  CheckpointError if a hook returns nothing, rows hold what a dump cannot, or ``path`` cannot be written
        """
        content, counters = storage.snapshot(copy=bool(self._save_hooks))  # hooks may change it in place
        layout: dict[str, Any] = {"name": "rows"}
        if content is not None:
            # In a full ring the oldest row is at the cursor, where the codecs must begin.
            is_full = counters["length"] >= counters["max_size"]
            where = {"shift": counters["cursor"] // prod(counters["trailing"]) if is_full else 0, "is_full": is_full}
            for hook in self._save_hooks:
                content = self._hooked(hook, content, **(where if getattr(hook, "takes_counters", False) else {}))
            content, layout = self._encode(content, where)
        with replace_directory(path) as folder:
            with self._open(folder) as (container, name):
                rows = (encode_rows if type(content) is list else encode)(content, container.put)
            notes = {"storage": type(storage).__name__, "ring": counters, "layout": layout, "container": name}
            write_manifest(folder, FORMAT, FORMAT_VERSION, {**notes, "rows": rows})

    def loads(self, storage: Storage, path: str | Path) -> None:
        """Replaces the content of ``storage`` by what ``dumps`` wrote to ``path``.

        Raises  CheckpointError, with the storage unchanged, if the checkpoint is missing, damaged, or does not fit
        """
        with reading_directory(path) as folder:
            manifest = read_manifest(type(self).__name__, folder, FORMAT, FORMAT_VERSION)
            name, files = manifest["container"], manifest["files"]
            if name is None:
                content = decode(manifest["rows"], FileContainer(folder, files).get)
            elif name not in files:
                raise CheckpointError(f"{folder}: the rows must lie in a file of the checkpoint: got {name!r}.")
            else:
                with H5Container.open(folder / name, "r") as container:
                    content = decode(manifest["rows"], container.get)
        if content is not None:
            content = _DECODERS[manifest["layout"]["name"]](content)
            for hook in self._load_hooks:
                content = self._hooked(hook, content)
        try:
            storage.restore(content, manifest["ring"])
        except DataError as error:
            raise CheckpointError(
                f"{type(self).__name__}: the rows in {path} must fit the storage they are loaded into: {error} Load "
                "them into a new storage, or into one that was built and filled in the same way."
            ) from error

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        """The content to write and the manifest's layout entry; ``where`` has ``shift`` and ``is_full``."""
        return content, {"name": "rows"}

    @contextmanager
    def _open(self, folder: Path) -> Iterator[tuple[FileContainer | H5Container, str | None]]:
        """The container to write to, and its file name if it is a single file (else None)."""
        with closing(FileContainer(folder)) as container:
            yield container, None

    def _hooked(self, hook: Hook, content: Any, **where: Any) -> Any:
        content = hook(content, **where)
        if content is None:
            raise CheckpointError(f"{type(self).__name__}: a hook must return the content: got None from {hook!r}.")
        return content


# --- the named checkpointers: another layout of the rows, or another container ---


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Writes rows of any form, grouped by form, with tensors in raw files."""


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Writes rows unchanged, one raw memory-mappable file per entry.

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
    """Writes steps in TED format with a codec; ``_layout`` is the codec's name in the manifest."""

    _layout: ClassVar[str]
    _codec_class: ClassVar[type[TED2Flat | TED2Nested]]

    def __init__(
        self, done_keys: Sequence[NestedKey] | None = None, reward_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self._codec = self._codec_class(done_keys=done_keys, reward_keys=reward_keys)
        self._warned = False

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        """Encodes rows with the codec; rows that are not TED stay unchanged, with a note in the manifest."""
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
    """Writes TED steps with each observation stored once (see `TED2Flat`), which saves up to half the space.

    ``done_keys`` and ``reward_keys`` are the entries of ``"next"`` that are not observations. Rows that do not follow
    each other, and ends that ``done`` does not mark, take extra space and are counted in the manifest, but are restored
    unchanged; rows that are not TED are stored unchanged.
    """

    _layout, _codec_class = "flat", TED2Flat


class NestedStorageCheckpointer(_StepsCheckpointer):
    """Writes TED steps as nested tensors, one row per trajectory (see `TED2Nested`)."""

    _layout, _codec_class = "nested", TED2Nested


class H5StorageCheckpointer(_StepsCheckpointer):
    """Writes TED steps to one HDF5 file, with a group per trajectory; requires h5py.

    ``checkpoint_file`` is the name of the file; ``h5_kwargs``, for instance ``{"compression": "gzip"}``, are passed to
    h5py's ``create_dataset``.
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
    def _open(self, folder: Path) -> Iterator[tuple[FileContainer | H5Container, str | None]]:
        with H5Container.open(folder / self.checkpoint_file, "w", self._h5_kwargs) as container:
            yield container, self.checkpoint_file


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Writes each member of a `StorageEnsemble` atomically to a numbered folder, with the member's own checkpointer.

    Transforms that have a ``state_dict`` are saved with them.
    """

    def register_save_hook(self, hook: Hook) -> None:
        raise UnsupportedError(
            "StorageEnsembleCheckpointer: members are written by their own checkpointers: register the hook there, for "
            "instance by ensemble.storages[0].register_save_hook(hook)."
        )

    register_load_hook = register_save_hook

    def dumps(self, storage: StorageEnsemble, path: str | Path) -> None:
        with replace_directory(path) as folder:
            for number, member in enumerate(storage.storages):
                member.checkpointer.dumps(member, folder / str(number))
            write_object(transform_states(storage.transforms), folder / _TRANSFORMS)
            members = [type(member).__name__ for member in storage.storages]
            write_manifest(folder, _ENSEMBLE_FORMAT, _ENSEMBLE_VERSION, {"members": members})

    def loads(self, storage: StorageEnsemble, path: str | Path) -> None:
        """Raises  CheckpointError, with every member unchanged, if one of them cannot be loaded"""
        with reading_directory(path) as folder:
            manifest = read_manifest(type(self).__name__, folder, _ENSEMBLE_FORMAT, _ENSEMBLE_VERSION)
            states = read_object(folder / _TRANSFORMS)
            folders = [folder / str(number) for number in range(len(manifest["members"]))]
            storage.restore_each(folders, states, lambda member, its: member.checkpointer.loads(member, its))


def default_for(storage: Storage) -> StorageCheckpointerBase:
    """A new checkpointer of the default class for the storage's type.

    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> type(default_for(LazyTensorStorage(10))).__name__
    'TensorStorageCheckpointer'
    """
    if isinstance(storage, StorageEnsemble):
        return StorageEnsembleCheckpointer()
    return TensorStorageCheckpointer() if isinstance(storage, TensorStorage) else ListStorageCheckpointer()
