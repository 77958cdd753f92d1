"""Checkpoint folders: replaced atomically, with a checksum of every file.

    path/
      checkpoint.current    the name of the current version, one line
      checkpoint.7/         its files and their manifest.json

A version is written to ``checkpoint.8.draft``, flushed to disk and renamed; then ``checkpoint.current`` is replaced
atomically; then older versions are removed, but for those that are being read. Writers wait for each other. Other files
in ``path`` are not touched. If a subfolder has its own manifest, that manifest covers its files, and the outer manifest
lists only the inner one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmrl.concurrency.folder_lock import locked
from llmrl.data.replay_buffers.serialization import object_bytes, object_from
from llmrl.errors import CheckpointError, DeadlineError

MANIFEST = "manifest.json"
_version = cache(version)
_POINTER = "checkpoint.current"
_MAX_ATTEMPTS = 100
_VERSION = re.compile(r"checkpoint\.(\d+)(\.draft)?")


# --- the folder ---


@contextmanager
def replace_directory(path: str | Path) -> Iterator[Path]:
    """Yields a new directory to fill, which becomes the content of ``path`` when the block ends without error.

    A kill at any moment leaves either the old content or the new one, complete; the next write removes leftover files.
    Nested calls for a directory inside the one being filled write in place, as part of the same atomic write.

    Raises  CheckpointError if ``path`` cannot be a directory, or writing fails
    """
    path = Path(path).absolute()
    if any((match := _VERSION.fullmatch(part)) and match[2] for part in path.parts):
        # Inside a draft: the rename of the outermost folder covers this part too.
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} must be a directory, or not exist: it is a file; choose another path."
        ) from error
    except OSError as error:
        raise _not_written(path, error) from error
    with locked(path):
        number = 1 + max((int(_VERSION.fullmatch(name)[1]) for name in _versions(path)), default=0)
        complete, draft = path / f"checkpoint.{number}", path / f"checkpoint.{number}.draft"
        try:
            draft.mkdir()
            yield draft
            # Flushed before the rename: otherwise a power cut could leave a final name with incomplete files.
            for folder, _, names in os.walk(draft):
                for name in (*names, "."):
                    _flush(Path(folder) / name)
            draft.rename(complete)
            pointer = path / f"{_POINTER}.draft"
            pointer.write_text(complete.name + "\n")
            _flush(pointer)
            pointer.replace(path / _POINTER)  # atomically makes the new version current
            _flush(path)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise _not_written(path, error) from error
            raise
        # Only now, because the old version was current until the pointer was replaced.
        for name in _versions(path):
            if name != complete.name:
                with suppress(DeadlineError, OSError), locked(path / name, timeout_s=0):  # held by those who read it
                    shutil.rmtree(path / name, ignore_errors=True)


def _not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} could not be written: {error}; make room or choose another path. What it held is still there."
    )


@contextmanager
def reading_directory(path: str | Path) -> Iterator[Path]:
    """Yields `current_directory`, which no writer removes inside the block."""
    with ExitStack() as stack:
        for attempt in itertools.count():
            folder = current_directory(path)
            try:
                stack.enter_context(locked(folder, shared=True))
            except FileNotFoundError:  # a writer has replaced and removed it
                if attempt == _MAX_ATTEMPTS:
                    raise CheckpointError(f"{path} is replaced too often to be read; load it again.") from None
                continue
            break
        yield folder


def current_directory(path: str | Path) -> Path:
    """The directory of the last complete write to ``path``.

    Raises  CheckpointError if there is none
    """
    path = Path(path)
    pointer = path / _POINTER
    if not path.is_dir():
        raise CheckpointError(f"{path} must be a directory that dumps wrote: there is none; check the path.")
    if not pointer.exists():
        return path  # a part of a larger write, or an unrelated folder, for which reading the manifest raises
    name = pointer.read_text().strip()
    while not (path / name).is_dir() and (newer := pointer.read_text().strip()) != name:
        name = newer  # a writer has replaced the version
    if not _VERSION.fullmatch(name) or not (path / name).is_dir():
        raise CheckpointError(
            f"{pointer} names the version {name!r}, which is not there; copy checkpoints as whole directories."
        )
    return path / name


def _versions(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir()]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the manifest ---


def write_manifest(folder: Path, kind: str, number: int, content: dict[str, Any]) -> None:
    """Writes the manifest of a complete folder, in which no file may change afterwards.

    ``kind`` and ``number`` are the format and its version.
    """
    manifest = {"format": kind, "format_version": number, "llmrl": _version("llmrl"), **content}
    manifest["files"] = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": file_digest(file)}
        for file in _files(folder)
    }
    manifest["checksum"] = _own_digest(manifest)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()]
    (folder / MANIFEST).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_manifest(who: str, folder: Path, kind: str, number: int) -> dict[str, Any]:
    """Returns the manifest of a folder after verifying every file against it.

    Raises  CheckpointError that names the file, if one is missing, has the wrong size, was changed, or is outside the
            folder, or if the format is different
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{who}: {folder} must be a checkpoint of llmrl: it has no {MANIFEST}; check the path, or load it with "
            "what wrote it."
        ) from error
    except (ValueError, OSError) as error:
        raise _damaged(who, file, f"it cannot be read ({error})") from error
    if (manifest.get("format"), manifest.get("format_version")) != (kind, number):
        raise CheckpointError(
            f"{who}: {folder} must hold {kind} in format version {number}: got {manifest.get('format')} in version "
            f"{manifest.get('format_version')}, written by llmrl {manifest.get('llmrl')}; check the path, or load it "
            "with that version, ``torch.save`` its state_dict() there and give that to load_state_dict here."
        )
    if manifest.get("checksum") != _own_digest(manifest):
        raise _damaged(who, file, "it was changed")
    for name, expected in manifest["files"].items():
        part = folder / name
        # A link, or a name with '..', would let a dump access any file that its reader can read.
        if not part.resolve().is_relative_to(folder.resolve()):
            raise _damaged(who, part, "it lies outside of the checkpoint")
        if not part.is_file():
            raise _damaged(who, part, "it is missing")
        size = part.stat().st_size
        if size != expected["bytes"]:  # before the checksum, which has to read the whole file
            raise _damaged(who, part, f"it has {size} bytes, expected {expected['bytes']}")
        if file_digest(part) != expected["sha256"]:
            raise _damaged(who, part, "its checksum differs")
    return manifest


def _damaged(who: str, file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{who}: the checkpoint is damaged: {file}: {what}; load an older one, or copy it again.")


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            found += [entry / MANIFEST] if (entry / MANIFEST).exists() else _files(entry)
        elif entry.name != MANIFEST:
            found.append(entry)
    return found


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _own_digest(manifest: dict[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# --- states ---


def write_object(value: Any, path: Path) -> None:
    """Like ``torch.save``, but a full disk raises the operating system's own error; see ``object_bytes``."""
    path.write_bytes(object_bytes(value, path.name))


def read_object(path: Path) -> Any:
    """Reads what ``write_object`` wrote. Raises  CheckpointError, also for a link out of the folder"""
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise CheckpointError(f"{path} must be a file of the dump: it is a link to {path.resolve()}; copy the file.")
    return object_from(path.read_bytes(), str(path))
