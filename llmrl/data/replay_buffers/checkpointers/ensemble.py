"""Several storages as one checkpoint: a numbered folder each, and the states of their transforms."""

from __future__ import annotations

from pathlib import Path

from llmrl.data.replay_buffers.checkpointers.base import (
    Hook,
    ListStorageCheckpointer,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from llmrl.data.replay_buffers.directory import (
    current_directory,
    read_manifest,
    read_object,
    replace_directory,
    write_manifest,
    write_object,
)
from llmrl.data.replay_buffers.storages import Storage, StorageEnsemble, TensorStorage
from llmrl.data.replay_buffers.utils import load_transforms, transform_states
from llmrl.errors import UnsupportedError

_FORMAT, _FORMAT_VERSION = "llmrl.storage_ensemble", 2
_TRANSFORMS = "transforms.pt"


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Writes each member of a `StorageEnsemble` with the member's own checkpointer, all of them or none.

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
                _checkpointer_of(member).dumps(member, folder / str(number))
            write_object(transform_states(storage.transforms), folder / _TRANSFORMS)
            members = [type(member).__name__ for member in storage.storages]
            write_manifest(folder, _FORMAT, _FORMAT_VERSION, {"members": members})

    def loads(self, storage: StorageEnsemble, path: str | Path) -> None:
        """Raises  CheckpointError, with every member unchanged, if one of them cannot be loaded"""
        folder = current_directory(path)
        manifest = read_manifest(type(self).__name__, folder, _FORMAT, _FORMAT_VERSION)
        states = read_object(folder / _TRANSFORMS)
        folders = [folder / str(number) for number in range(len(manifest["members"]))]
        storage.restore_each(folders, lambda member, its: _checkpointer_of(member).loads(member, its))
        load_transforms(storage.transforms, states)


def default_for(storage: Storage) -> StorageCheckpointerBase:
    """A new checkpointer of the kind that suits the storage best.

    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> type(default_for(LazyTensorStorage(10))).__name__
    'TensorStorageCheckpointer'
    """
    if isinstance(storage, StorageEnsemble):
        return StorageEnsembleCheckpointer()
    return TensorStorageCheckpointer() if isinstance(storage, TensorStorage) else ListStorageCheckpointer()


def _checkpointer_of(member: Storage) -> StorageCheckpointerBase:
    return default_for(member) if member.checkpointer is None else member.checkpointer
