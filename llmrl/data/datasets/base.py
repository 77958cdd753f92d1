"""The base of all offline datasets: converts files of a public format to memory-mapped rows, atomically.

<root>/<dataset_id>/
  checkpoint.current  checkpoint.1/    the rows, see rows.py; replaced atomically
  downloads/                           downloaded files; removed when the rows are complete
  build.lock                           held by the process that builds; others wait
<root>/<dataset_id>_split/             the same rows, one per trajectory, for ``split_trajs``
"""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.datasets.downloads import RemoteFile, fetch, hub_files, read_ledger, remove_downloads
from llmrl.data.datasets.rows import MARKER, DatasetStorage, RowWriter, read_marker
from llmrl.data.replay_buffers import ImmutableDatasetWriter, TensorDictReplayBuffer, TensorStorage, Writer
from llmrl.data.replay_buffers.directory import current_directory, file_digest, replace_directory
from llmrl.data.replay_buffers.process_lock import ProcessLock
from llmrl.data.trajectories import split_trajectories
from llmrl.errors import CheckpointError, ConfigError, DataError, did_you_mean

_CHUNK = 1000  # rows per call of the function of ``preprocess``


class BaseDatasetExperienceReplay(TensorDictReplayBuffer, ABC):
    """Rows of a public dataset in TED, as a read-only buffer.

    The rows are mapped from files below ``root`` (default ``~/.cache/llmrl/<kind of dataset>``). If they do not
    exist, they are built: from ``source`` (a local file or folder in the public format), else from such files in
    ``<root>/<dataset_id>``, else from a download. ``download=False`` never uses the network, ``"force"`` rebuilds the
    rows. With ``split_trajs`` a row is a trajectory, padded with zeros, with ``"mask"`` (True on its steps) and
    ``"traj_ids"``. Other arguments are those of ``TensorDictReplayBuffer``.

    A subclass defines ``kind``, ``suffixes`` and `_read`, which converts its files to rows; ``available_datasets`` and
    `_remote_files` list the downloads.

    Raises   ConfigError for an unknown name, or rows that were built with other options or from other files; DataError
             for missing or broken files; DeadlineError if another process holds the build lock for too long
    """

    kind: ClassVar[str]  # the name of the folder below ~/.cache/llmrl
    suffixes: ClassVar[tuple[str, ...]]  # file name suffixes
    available_datasets: Sequence[str] = ()
    repository: ClassVar[str | None] = None  # the dataset repository on the Hugging Face hub
    lock_timeout_s: float = 6 * 3600.0

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: str | Path | None = None,
        download: bool | str = True,
        source: str | Path | None = None,
        split_trajs: bool = False,
        options: dict[str, Any] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        **buffer: Any,
    ) -> None:
        if download not in (True, False, "force"):
            raise ConfigError(f"{self._who}: download must be True, False or 'force': got {download!r}.")
        parts = Path(dataset_id).parts
        if not parts or ".." in parts or Path(dataset_id).is_absolute():
            raise ConfigError(f"{self._who}: dataset_id must be a relative path below root: got {dataset_id!r}.")
        self.dataset_id, self.split_trajs = dataset_id, split_trajs
        self.root = Path(root).expanduser() if root else Path.home() / ".cache" / "llmrl" / self.kind
        self._source = None if source is None else Path(source).expanduser()
        self._options = options or {}
        storage = self._open(download)
        super().__init__(storage=storage, batch_size=batch_size, writer=writer or ImmutableDatasetWriter(), **buffer)

    @property
    def _who(self) -> str:
        return type(self).__name__

    @property
    def data_path_root(self) -> Path:
        """The folder of the dataset."""
        return self.root / self.dataset_id

    @property
    def data_path(self) -> Path:
        """The folder of the rows that are read; with ``split_trajs`` a sibling of the dataset's folder."""
        return self.root / f"{self.dataset_id}_split" if self.split_trajs else self.data_path_root

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the whole dataset, from its files."""
        return self._storage.notes.get("metadata", {})

    # --- what a format defines ---

    @abstractmethod
    def _read(self, files: list[Path], notes: dict[str, Any]) -> Iterator[tuple[TensorDictBase, str]]:
        """Yields (rows, name of their source) part by part; may add to the ``notes``.

        Notes: "metadata", and "following": entries whose value under ``"next"`` is read from the following row.
        """

    def _remote_files(self) -> list[RemoteFile]:
        """The files to download; by default those in the dataset's folder of ``repository``."""
        return hub_files(self._who, self.repository, self.dataset_id, self.suffixes) if self.repository else []

    def _download(self, folder: Path) -> list[Path]:
        """Downloads the files of the dataset to the folder; returns their paths."""
        return fetch(self._who, self._remote_files(), folder)

    def _check_name(self) -> None:
        if self.dataset_id not in self.available_datasets:
            raise ConfigError(
                f"{self._who}: a dataset to download must be one of {self._who}.available_datasets: got "
                f"{self.dataset_id!r}.{did_you_mean(self.dataset_id, self.available_datasets)} To read local "
                "files, give source=...; the name is then free."
            )

    # --- opening and building ---

    def _open(self, download: bool | str) -> DatasetStorage:
        if download == "force" or not self._is_built():
            with self._lock():
                # Checked again under the lock: another process may have built it while this one waited.
                if download == "force" or self._notes_of(self.data_path_root) is None:
                    self._build(bool(download))
                if self.split_trajs and not self._is_built():
                    self._build_split()
        storage = DatasetStorage(self._who, current_directory(self.data_path))
        self._check_notes(storage.notes)
        return storage

    def _is_built(self) -> bool:
        rows = self._notes_of(self.data_path)
        if rows is None or not self.split_trajs:
            return rows is not None
        # If the rows were rebuilt, the trajectories are rebuilt too. If the rows were removed, trajectories are kept.
        whole = self._notes_of(self.data_path_root)
        return whole is None or rows["split_of"] == whole["id"]

    def _notes_of(self, path: Path) -> dict[str, Any] | None:
        """The notes of the rows at ``path``; None if the rows are missing or incomplete."""
        try:
            folder = current_directory(path)
        except CheckpointError:
            return None
        return read_marker(self._who, folder)["notes"] if (folder / MARKER).exists() else None

    def _files_here(self, download: bool) -> list[Path]:
        """The local files; none if they must be downloaded. Raises DataError if that is not allowed."""
        files = self._local_files()
        if not files and not download:
            raise DataError(
                f"{self._who}: {self.dataset_id} must be in {self.data_path_root}, or download must be True: found "
                f"neither a dataset nor a file that ends in {' or '.join(self.suffixes)}; put the files there, or "
                "give source=..., a file or folder."
            )
        return files

    def _build(self, download: bool) -> None:
        downloads = self.data_path_root / "downloads"
        files = self._files_here(download)
        if not files:
            self._check_name()
            files = self._download(downloads)
        notes = {"sources": [self._source_entry(file) for file in files]}
        self._write(self.data_path_root, self._read(files, notes), notes)
        remove_downloads(downloads)

    def _build_split(self) -> None:
        """Writes one row per trajectory; trajectories end where ``("next", "done")`` is True."""
        storage = DatasetStorage(self._who, current_directory(self.data_path_root))
        kept = {name: value for name, value in storage.notes.items() if name not in ("following", "id", "preprocessed")}
        rows = split_trajectories(storage.get(slice(0, len(storage))), prefix=())
        self._write(self.data_path, [(rows, "split_trajs")], {**kept, "split_of": storage.notes["id"]})

    def _write(self, path: Path, parts: Iterable[tuple[TensorDictBase, str]], notes: dict[str, Any]) -> None:
        own = {"id": uuid.uuid4().hex, "dataset": f"{self._who} {self.dataset_id}", "options": self._options}
        with replace_directory(path) as draft, RowWriter(self._who, draft) as writer:
            for rows, source in parts:
                writer.write(rows, source)
            writer.complete({**notes, **own})  # last: reading the parts may have added to the notes

    def _local_files(self) -> list[Path]:
        where = self._source or self.data_path_root
        if where.is_file():
            return [where]
        # Skips what llmrl itself wrote below the folder: a partial download is not a file of the dataset.
        own = [self.data_path_root / "downloads", *self.data_path_root.glob("checkpoint.*")]
        found = [
            path
            for path in sorted(where.rglob("*"))
            if path.is_file()
            and path.name.endswith(self.suffixes)
            and not any(folder in path.parents for folder in own)
        ]
        if self._source is not None and not found:
            raise DataError(
                f"{self._who}: source must be a file, or a folder with files that end in {' or '.join(self.suffixes)}: "
                f"got {where}{'' if where.exists() else ', which does not exist'}."
            )
        return found

    def _source_entry(self, file: Path) -> dict[str, Any]:
        known = read_ledger(self.data_path_root / "downloads").get(file.name, {}).get("sha256")
        about = file.stat()
        entry = {"name": file.name, "bytes": about.st_size, "changed": about.st_mtime_ns}
        return {**entry, "sha256": known or file_digest(file)}

    def _is_source(self, file: Path, entry: dict[str, Any]) -> bool:
        about = file.stat()
        if (file.name, about.st_size) != (entry["name"], entry["bytes"]):
            return False
        # Hashing is slow: only files with another modification time (copies) are hashed.
        return about.st_mtime_ns == entry["changed"] or file_digest(file) == entry["sha256"]

    def _check_notes(self, notes: dict[str, Any]) -> None:
        again = "give download='force' to rebuild it, or another root"
        if notes["options"] != self._options:
            raise ConfigError(
                f"{self._who}: {self.data_path} must have been built with {self._options}: got {notes['options']}; "
                f"{again}."
            )
        if self._source is None:
            return
        files = self._local_files()
        if len(files) != len(notes["sources"]) or not all(map(self._is_source, files, notes["sources"])):
            raise ConfigError(
                f"{self._who}: {self.data_path} must have been built from {self._source}, whose files differ; {again}."
            )

    def _lock(self) -> ProcessLock:
        self.data_path_root.mkdir(parents=True, exist_ok=True)
        lock = ProcessLock(self.data_path_root / "build.lock", self.lock_timeout_s)
        lock.hand_over()  # excludes unrelated processes too, not only those that inherit it
        return lock

    # --- changing and removing ---

    def preprocess(
        self,
        fn: Callable[[TensorDictBase], TensorDictBase],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        num_frames: int | None = None,
        dest: str | Path | None = None,
        **pool: Any,
    ) -> TensorStorage:
        """Replaces the stored rows on disk with those that ``fn`` returns.

        ``fn`` gets ``chunksize`` rows (default 1000; 0 gives it single rows without a batch dimension), or one of
        ``num_chunks`` parts, and returns as many rows. ``num_workers`` processes share the work (default: this one);
        ``pool``, ``generator``, ``max_tasks_per_child``, ``worker_threads``, ``index_with_generator``, ``pbar`` and
        ``mp_start_method`` are those of ``TensorDict.map_iter``. ``num_frames`` keeps only the first rows. With
        ``dest`` the rows are written to that folder, and the dataset is unchanged.

        Returns  a storage of the new rows
        """
        if dim != 0:
            raise ConfigError(f"{self._who}: dim must be 0, the dimension of the rows: got {dim}.")
        count = min(num_frames or len(self), len(self))
        task = _Task(self._who, current_directory(self.data_path), fn)
        at = TensorDict(at=torch.arange(count), batch_size=[count])  # workers get positions and map the files
        size = chunksize if chunksize is not None or num_chunks else _CHUNK
        if num_workers or pool.get("pool") is not None:
            made = at.map_iter(task, 0, num_workers, chunksize=size, num_chunks=num_chunks, **pool)
        else:
            size = size if size is not None else -(-count // num_chunks)
            made = map(task, at.split(size) if size else at.unbind(0))
        # ``fn`` receives and returns the next observations too, so they are stored like all other entries.
        notes = {name: value for name, value in self._storage.notes.items() if name != "following"}
        notes |= {"preprocessed": True}
        path = self.data_path if dest is None else Path(dest).expanduser()
        with self._lock():
            self._write(path, ((rows, "preprocess") for rows in made), notes)
        storage = DatasetStorage(self._who, current_directory(path))
        if dest is None:
            self.set_storage(storage)
        return storage

    def delete(self) -> None:
        """Removes the rows and downloads from disk; keeps files that llmrl did not write."""
        with self._lock():
            for path in {self.data_path, self.data_path_root}:
                _remove(path)
        for path in {self.data_path, self.data_path_root}:
            (path / "build.lock").unlink(missing_ok=True)
            while path != self.root and path.is_dir() and not any(path.iterdir()):
                path.rmdir()
                path = path.parent


class _Task:
    def __init__(self, who: str, folder: Path, fn: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self.who, self.folder, self.fn = who, folder, fn
        self._storage: DatasetStorage | None = None

    def __call__(self, at: TensorDictBase) -> TensorDictBase:
        if self._storage is None:
            self._storage = DatasetStorage(self.who, self.folder)
        index = at.get("at")
        made = self.fn(self._storage.get(index if index.ndim else int(index)))
        if not isinstance(made, TensorDictBase) or made.batch_size[: index.ndim] != index.shape:
            got = f"batch size {list(made.batch_size)}" if isinstance(made, TensorDictBase) else type(made).__name__
            raise DataError(
                f"{self.who}: the function of preprocess must return one row per row, as a tensordict: got {got}, "
                f"expected a batch size that begins with {list(index.shape)}."
            )
        return made if index.ndim else made.unsqueeze(0)

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle, because pickle rejects lambdas. The storage is not sent: each process opens it.
        return {"who": self.who, "folder": self.folder, "fn": cloudpickle.dumps(self.fn)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["who"], state["folder"], cloudpickle.loads(state["fn"]))


def _remove(path: Path) -> None:
    if not path.is_dir():
        return
    for folder in path.glob("checkpoint.*"):
        if folder.is_dir() and ((folder / MARKER).exists() or folder.suffix == ".draft"):
            shutil.rmtree(folder)
    (path / "checkpoint.current").unlink(missing_ok=True)
    remove_downloads(path / "downloads", forget=True)
    if (path / "downloads").is_dir() and not os.listdir(path / "downloads"):
        (path / "downloads").rmdir()
