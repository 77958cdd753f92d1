"""Reads and writes the files of a run folder, whose content may come from a stranger.

Files are regular files of bounded size, opened without following links. Writes are atomic and leave no draft behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llmrl.errors import RunFolderError

_MAX_TEXT, _MAX_DATA = 16 << 20, 4 << 30  # bytes of a text such as run.json; of any file


def open_file(path: Path, mode: str = "rb", *, links: bool = False, max_bytes: int = _MAX_DATA) -> BinaryIO:
    """Opens a regular file: "rb" to read, "a+b" to append, "xb" for a new file. ``links`` follows a link.

    Raises  OSError, also for a link, a pipe, a device, and a file of more than ``max_bytes``
    """
    flags = {"rb": os.O_RDONLY, "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND, "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL}
    # O_NONBLOCK: opening a pipe would wait for its other end; it has no effect on a regular file.
    asked = flags[mode] | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, asked, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link; put the file itself there", str(path)) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file; remove it", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, at most {max_bytes} are read", str(path))
        return os.fdopen(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, *, links: bool = False, max_bytes: int = _MAX_TEXT, encoding: str = "utf-8") -> str:
    """The text of a regular file. Raises OSError like `open_file`, and UnicodeDecodeError."""
    with open_file(path, links=links, max_bytes=max_bytes) as file:
        return file.read(max_bytes).decode(encoding)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Writes a file atomically: another process sees either the old content or all that the block writes.

    Raises  RunFolderError
    """
    # The draft is in the same folder, because a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with writing(path):
        try:
            draft.unlink(missing_ok=True)
            with open_file(draft, "xb") as file:
                yield file
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)  # on a full disk, drafts would fill it further
            raise


def replace_file(path: Path, text: str) -> None:
    """Writes a text file atomically. Raises RunFolderError."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the file system into a RunFolderError that names ``path`` and the remedy."""
    try:
        yield
    # RunFolderError is an OSError too, but already names its file and remedy.
    except RunFolderError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = f"{free_space(path)}; make room"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "choose a folder that can be written, for new runs with --runs DIR"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            remedy = "a file is where a folder must be: remove it, or choose another place with --runs DIR"
        elif error.errno == errno.ENOENT:
            remedy = "the folder was removed meanwhile; start a new run"
        else:
            remedy = "check that disk"
        raise RunFolderError(f"{path}: cannot be written: {error.strerror or error}; {remedy}.") from error


def share_files(folder: Path, like: Path) -> None:
    """Gives the files below ``folder`` the permissions of ``like``, a file as the umask makes one: those of safetensors
    can be read by their owner alone, and a server of another user could not load them.
    """
    mode = stat.S_IMODE(like.stat().st_mode)
    for path in (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        with suppress(PermissionError):  # a file system that keeps its own permissions, or a rank of another user
            path.chmod(mode)


def free_space(path: Path) -> str:
    """The free space on the disk of ``path``, in words."""
    try:
        usage = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError:
        return "the disk's free space is unknown"
    unit, size = ("GiB", 2**30) if usage.total >= 2**30 else ("MiB", 2**20)
    return f"{usage.free / size:.2f} {unit} free of {usage.total / size:.2f} {unit} on that disk"
