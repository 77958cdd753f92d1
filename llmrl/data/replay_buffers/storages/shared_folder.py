"""Tensors in the files of one folder, which every process of the machine can map.

A folder under /dev/shm is in memory only; a folder on disk may be larger than memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmrl.concurrency.folder_lock import locked
from llmrl.errors import DeadlineError

_MEMORY = Path("/dev/shm")
_PREFIX = "buffer."  # prefix of all file names
_FOLDER, _OWNED = "llmrl-buffer-", "owned"  # a file in temporary folders that are to be removed with their owner


class SharedFolder:
    """A folder of tensors. A pickled copy maps the owner's files; only the owner removes them.

    With ``path`` None it is a temporary folder, in memory with ``in_memory``. ``existsok`` allows existing files to be
    replaced. ``cleanup`` removes the files when the owner is garbage-collected; by default only in temporary folders.
    """

    def __init__(
        self,
        who: str,
        path: str | Path | None = None,
        *,
        existsok: bool = False,
        cleanup: bool | None = None,
        in_memory: bool = False,
    ) -> None:
        self.who = who
        if path is None:
            parent = _MEMORY if in_memory and os.access(_MEMORY, os.W_OK) else None
            for folder in {_MEMORY, Path(tempfile.gettempdir())}:
                _remove_abandoned(folder)
            self.path = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
        else:
            self.path = Path(path).absolute()
            if self.path.exists() and not self.path.is_dir():
                raise RuntimeError(f"{who}: scratch_dir must be a directory: got the file {self.path}.")
            if not existsok and self.path.exists() and any(self.path.iterdir()):
                raise RuntimeError(
                    f"{who}: scratch_dir must be new or empty: {self.path} has files; choose another one, or pass "
                    "existsok=True to replace them."
                )
            self.path.mkdir(parents=True, exist_ok=True)
        if path is None if cleanup is None else cleanup:
            if path is None:
                # The lock ends with this process and its forks, however they end; only then may others remove it.
                weakref.finalize(self, os.close, _lock(self.path))
                self.file(_OWNED).touch()
            # Bound to this process id: a forked copy of this object must not remove files that its parent uses.
            weakref.finalize(self, _remove, self.path, os.getpid())

    def file(self, name: str) -> Path:
        """The path for a new file in place of an older one; processes that map the older one keep it."""
        path = self.find(name)
        path.unlink(missing_ok=True)  # truncating the old file would erase it for processes that still map it
        return path

    def find(self, name: str) -> Path:
        """The path of a file, even if another process wrote it."""
        return self.path / f"{_PREFIX}{name}"

    def check_space(self, num_bytes: int) -> None:
        """Raises if the disk has less free space than that."""
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            raise OSError(
                f"{self.who}: the disk of {self.path} must have room for max_size rows: they take {num_bytes:,} bytes, "
                f"{free:,} are free; choose a smaller max_size or another scratch_dir."
            )

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in a new file whose disk space is reserved now, so that a full disk raises here."""
        self.file(name).touch()
        try:
            self.take_space(name, prod(shape) * dtype.itemsize)
        except OSError:
            self.find(name).unlink()
            raise
        return self.map(name, shape, dtype)

    def sparse(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a file that all processes share; before a part of it is written, `take_space` reserves it."""
        with self.find(name).open("ab") as file:
            file.truncate(prod(shape) * dtype.itemsize)
        return self.map(name, shape, dtype)

    def take_space(self, name: str, num_bytes: int) -> None:
        """Reserves disk space for the first bytes of a file. Raises OSError if there is none."""
        if not num_bytes:
            return
        with self.find(name).open("r+b") as file:
            try:
                # A sparse file would succeed here; a later write on a full disk would kill the process (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{self.who}: the disk of {self.path} has no room for {num_bytes:,} bytes: {error.strerror}",
                ) from error

    def map(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor in a file that this or another process has allocated."""
        path, size = self.find(name), prod(shape)
        if not path.exists():
            raise RuntimeError(
                f"{self.who}: a shared storage exists only as long as its owner, on one machine: {path} does not exist "
                "(any more)."
            )
        if not size:
            return torch.zeros(*shape, dtype=dtype)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(*shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"who": self.who, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.who, self.path = state["who"], state["path"]


def _lock(folder: Path) -> int:
    import fcntl  # POSIX only, like shared buffers

    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # no locks on this file system: then others cannot take it either
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Removes this user's folders of owners that were killed."""
    for folder in parent.glob(f"{_FOLDER}*"):
        with suppress(OSError, DeadlineError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / (_PREFIX + _OWNED)).exists():
                continue
            with locked(folder, timeout_s=0, required=True):
                shutil.rmtree(folder)


def _remove(path: Path, owner: int) -> None:
    """Removes the buffer's files, whichever process wrote them, and the folder if nothing else is in it."""
    if os.getpid() != owner or not path.is_dir():
        return
    for file in path.glob(f"{_PREFIX}*"):
        file.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
