"""The checkpointer: writes the rows and counters of a storage to a directory, and reads them back.

    dumps   storage.snapshot() -> save hooks -> layout -> files, manifest -> one atomic step (``directory.py``)
    loads   manifest, checksums -> files -> layout -> load hooks -> storage.restore()

A checkpoint names its own layout and container, so any checkpointer reads what any other one wrote; the classes differ
in what they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.data.replay_buffers.checkpointers.containers import Container, FileContainer, H5Container
from llmrl.data.replay_buffers.directory import current_directory, read_manifest, replace_directory, write_manifest
from llmrl.data.replay_buffers.serialization import decode, encode, encode_rows
from llmrl.data.ted import Flat2TED, H5Combine, Nested2TED
from llmrl.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.storages import Storage

__all__ = ["StorageCheckpointerBase"]

FORMAT, FORMAT_VERSION = "llmrl.storage", 3

Hook = Callable[[Any], Any]
Encoded = tuple[Any, dict[str, Any]]

_DECODERS: dict[str, Hook] = {
    "rows": lambda content: content,
    "flat": Flat2TED(),
    "nested": Nested2TED(),
    "h5": lambda content: Nested2TED()(H5Combine()(content)),
}


class StorageCheckpointerBase:
    """Writes rows as they are, a raw file per entry, under a manifest with the layout and a checksum of every file.

    Only rows that were written are saved, and equal rows give equal files. A path can be written again and again, also
    one that holds the storage's own memory-mapped files; a kill at any moment leaves the old checkpoint or the new one.
    Nothing of it runs when it is loaded: objects that are not made of data are refused when they are written.

    Sub-classes override ``_encode`` to lay rows out in another way and ``_open`` to put them into another container.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """``hook(content)`` returns what is written in place of the rows; the codecs of `llmrl.data.ted` are hooks.

        With ``takes_counters = True`` it also gets the place of the oldest row: ``hook(content, shift=, is_full=)``.
        """
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """``hook(content)`` returns the rows that are restored from what was written."""
        self._load_hooks.append(hook)

    def dumps(self, storage: Storage, path: str | Path) -> None:
        """Writes the rows and counters of ``storage`` to the directory ``path``.

        Raises  CheckpointError if a hook returns nothing, rows hold what a dump cannot, or ``path`` cannot be written
        """
        content, counters = storage.snapshot(copy=bool(self._save_hooks))  # a hook may write into what it gets
        layout: dict[str, Any] = {"name": "rows"}
        if content is not None:
            # The oldest row of a full ring is where the next one goes; the codecs begin there.
            is_full = counters["length"] >= counters["max_size"]
            where = {"shift": counters["cursor"] // prod(counters["trailing"]) if is_full else 0, "is_full": is_full}
            for hook in self._save_hooks:
                content = hook(content, **where) if getattr(hook, "takes_counters", False) else hook(content)
                self._check_hook(hook, content)
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
        content, counters = self._read(path)
        try:
            storage.restore(content, counters)
        except DataError as error:
            raise CheckpointError(
                f"{type(self).__name__}: the rows in {path} must fit the storage they are loaded into: {error} Load "
                "them into one that was built and filled alike, or that is new."
            ) from error

    def _read(self, path: str | Path) -> tuple[Any, dict[str, Any]]:
        folder = current_directory(path)
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
                content = hook(content)
                self._check_hook(hook, content)
        return content, manifest["ring"]

    def _encode(self, content: Any, where: dict[str, Any]) -> Encoded:
        """The content to write and the manifest's note on its layout; ``where`` is ``shift`` and ``is_full``."""
        return content, {"name": "rows"}

    @contextmanager
    def _open(self, folder: Path) -> Iterator[tuple[Container, str | None]]:
        """The container to write to, and the name of its file if it is one."""
        with closing(FileContainer(folder)) as container:
            yield container, None

    def _check_hook(self, hook: Hook, content: Any) -> None:
        if content is None:
            raise CheckpointError(f"{type(self).__name__}: a hook must return the content: got None from {hook!r}.")
