"""Writing a directory so that a reader finds the old content or the new one, never half of it.

    path/
      checkpoint.current    the name of the version that counts, one line
      checkpoint.7/         its files

A version is written to ``checkpoint.8.draft``, flushed to the disk and renamed; then ``checkpoint.current`` is
replaced, which is one atomic step; then older versions are removed. Nothing else that lies in ``path`` is touched. What
is in a version is the writer's business. `StateFile` is for what has no directory of its own to replace: a part of one.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from llmrl.errors import CheckpointError

__all__ = [
    "StateFile",
    "current_directory",
    "object_bytes",
    "object_from",
    "read_object",
    "replace_directory",
    "write_object",
]

_POINTER = "checkpoint.current"
_VERSION = re.compile(r"checkpoint\.(\d+)(\.draft)?")


@contextmanager
def replace_directory(path: str | Path) -> Iterator[Path]:
    """A new directory to fill; it becomes the content of ``path`` when the block ends without error.

    A kill at any moment leaves the content as it was, or as it is meant to be; the next write removes what is left.
    Inside the block, a directory below the one that is being filled is written in place: it is part of the same write.

    Raises  CheckpointError if ``path`` cannot be a directory, or the disk does not take what is written
    """
    path = Path(path).absolute()
    if any((match := _VERSION.fullmatch(part)) and match[2] for part in path.parts):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} must be a directory, or not exist: it is a file; choose another path."
        ) from error
    number = 1 + max((int(_VERSION.fullmatch(name)[1]) for name in _versions(path)), default=0)
    version, draft = path / f"checkpoint.{number}", path / f"checkpoint.{number}.draft"
    draft.mkdir()
    try:
        yield draft
        for folder, _, names in os.walk(draft):
            for name in (*names, "."):
                _flush(Path(folder) / name)
        draft.rename(version)
        _point_to(path, version.name)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} could not be written: {error}; make room or choose another path. What it held is still there."
            ) from error
        raise
    for name in _versions(path):
        if name != version.name:
            shutil.rmtree(path / name, ignore_errors=True)


class StateFile:
    """For parts of a buffer whose state is small: ``dumps`` and ``loads`` for what has ``state_dict``."""

    def dumps(self, path: str | Path) -> None:
        """Writes the state to the directory ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        write_object(self.state_dict(), Path(path) / "state.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote."""
        self.load_state_dict(read_object(Path(path) / "state.pt"))


def write_object(value: Any, path: Path) -> None:
    """``torch.save``, with the operating system's own error where the disk is full. Raises  as ``object_bytes``"""
    path.write_bytes(object_bytes(value, path.name))


def read_object(path: Path) -> Any:
    """What ``write_object`` wrote. Raises  as ``object_from``"""
    return object_from(path.read_bytes(), str(path))


def object_bytes(value: Any, who: str) -> bytes:
    """What ``object_from`` gives back.

    Raises  CheckpointError, in the name of ``who``, for what could only be read by running code
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{who}: a dump must hold tensors, numbers, strings, None, lists, tuples, dicts, tensordicts and "
            f"tensorclasses: got {_refused(buffer.getvalue(), error)}; store what it is made of, or keep it out of the "
            "dump."
        ) from error
    return buffer.getvalue()


def object_from(data: bytes, who: str) -> Any:
    """The value, without running code for it. Raises  CheckpointError, in the name of ``who``, where that takes code"""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{who} must hold data, as dumps writes it: got {_refused(data, error)}; load another dump."
        ) from error


def _refused(data: bytes, error: Exception) -> str:
    """The classes and functions that reading would call; the error if none can be named."""
    try:
        names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # a pickle that torch did not write, or half of one
        names = ""
    return names or ("what only code could read" if isinstance(error, UnpicklingError) else str(error))


def current_directory(path: str | Path) -> Path:
    """The directory that holds what was last written to ``path`` as a whole.

    Raises  CheckpointError if nothing ever was
    """
    path = Path(path)
    pointer = path / _POINTER
    if not path.is_dir():
        raise CheckpointError(f"{path} must be a directory that dumps wrote: there is none; check the path.")
    if not pointer.exists():
        return path  # a part of a larger write, or not ours: that is for the reader to find out
    name = pointer.read_text().strip()
    if not _VERSION.fullmatch(name) or not (path / name).is_dir():
        raise CheckpointError(
            f"{pointer} names the version {name!r}, which is not there; copy checkpoints as whole directories."
        )
    return path / name


def _versions(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir()]


def _point_to(path: Path, name: str) -> None:
    draft = path / f"{_POINTER}.draft"
    draft.write_text(name + "\n")
    _flush(draft)
    draft.replace(path / _POINTER)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
