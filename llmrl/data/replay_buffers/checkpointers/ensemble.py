"""Several storages as one checkpoint: a numbered folder each, and the states of their transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmrl.data.replay_buffers.checkpointers.base import Hook, StorageCheckpointerBase
from llmrl.data.replay_buffers.checkpointers.manifest import read_manifest, write_manifest
from llmrl.data.replay_buffers.directory import current_directory, read_object, replace_directory, write_object
from llmrl.data.replay_buffers.transforms import load_transform, transform_state
from llmrl.errors import UnsupportedError

__all__ = ["StorageEnsembleCheckpointer"]

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

    def dumps(self, storage: Any, path: str | Path) -> None:
        with replace_directory(path) as folder:
            for number, member in enumerate(storage.storages):
                member.checkpointer.dumps(member, folder / str(number))
            write_object([transform_state(transform) for transform in storage.transforms], folder / _TRANSFORMS)
            members = [type(member).__name__ for member in storage.storages]
            write_manifest(folder, _FORMAT, _FORMAT_VERSION, {"members": members})

    def loads(self, storage: Any, path: str | Path) -> None:
        """Raises  CheckpointError, with every member unchanged, if one of them cannot be loaded"""
        folder = current_directory(path)
        manifest = read_manifest(type(self).__name__, folder, _FORMAT, _FORMAT_VERSION)
        states = read_object(folder / _TRANSFORMS)
        folders = [folder / str(number) for number in range(len(manifest["members"]))]
        storage.restore_each(folders, lambda member, its: member.checkpointer.loads(member, its))
        for transform, state in zip(storage.transforms, states, strict=True):
            load_transform(transform, state)
