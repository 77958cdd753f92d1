"""The folder of one run: its name, the paths in it, and its lock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError, RunFolderError, closest

__all__ = ["RunDir", "free_space", "replace_file", "writing"]

_INFO = {"command": str, "recipe": str, "arguments": list, "origins": dict, "defaults": dict, "plan": list}


@dataclass(frozen=True)
class RunDir:
    """``runs/<name>/`` and the paths in it.

    ``config``       config.yaml, the full configuration of the run, defaults included
    ``info``         run.json, the command, its arguments, versions
    ``metrics``      metrics.jsonl, one JSON object per step (`MetricsLog`)
    ``rollouts``     one Parquet file per step (`RolloutLog`)
    ``checkpoints``  ``stepN`` folders (`CheckpointStore`)

    >>> RunDir(Path("runs/sums-grpo-3f2a")).metrics.as_posix()
    'runs/sums-grpo-3f2a/metrics.jsonl'
    """

    path: Path

    config = property(lambda self: self.path / "config.yaml")
    info = property(lambda self: self.path / "run.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    rollouts = property(lambda self: self.path / "rollouts")
    checkpoints = property(lambda self: self.path / "checkpoints")

    @classmethod
    def create(cls, recipe: str, config_text: str, *, root: Path | str = "runs", name: str | None = None) -> RunDir:
        """Makes a new, unique folder, even if another run starts at the same moment.

        The default ``name`` is the recipe's name and four digits of a hash of the configuration and the time.

        Raises  ConfigError if ``name`` is taken or cannot be a folder's name; RunFolderError if no folder can be made
        """
        root = Path(root)
        if name is not None:
            if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
                raise ConfigError(f"--name  must be letters, digits and . _ + = -: got {name!r}")
            if _make(root / name):
                return cls(root / name)
            raise ConfigError(
                f"--name  {root / name} exists; choose another name, or continue it: llmrl resume {root / name}"
            )
        stem = re.sub(r"[^a-z0-9.]+", "-", recipe.lower()).strip("-.") or "run"
        moment = time.time_ns()
        for attempt in range(10_000):
            digits = hashlib.sha256(f"{config_text}\0{moment}\0{attempt}".encode()).hexdigest()[:4]
            if _make(root / f"{stem}-{digits}"):
                return cls(root / f"{stem}-{digits}")
        raise ConfigError(f"{root}  holds too many runs named {stem}-....; give this one a --name")

    @classmethod
    def open(cls, path: Path | str, *, root: Path | str = "runs") -> RunDir:
        """An existing run, by its path or by its name under ``root``.

        Raises  ConfigError that names the nearest run
        """
        for candidate in (Path(path), Path(root) / path):
            if (candidate / "config.yaml").is_file():
                return cls(candidate)
        runs = [entry.parent.name for entry in sorted(Path(root).glob("*/config.yaml"))]
        hint = f"\nruns here     {', '.join(runs[-8:])}" if runs else ""
        if match := closest(Path(path).name, runs):
            hint = f"\ndid you mean  {Path(root) / match}?"
        raise ConfigError(f"{path}  is not a run: {Path(path) / 'config.yaml'} does not exist{hint}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run, so that no other process trains in it. The lock is released when the process ends in any way.

        On file systems without locks the run continues without one.

        Raises  RunFolderError that names the process that holds the lock, or if the folder cannot be written
        """
        with writing(self.path / ".lock"):
            file = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise RunFolderError(
                    f"{self.path}: must have one process at a time: got a second one, beside {file.read().strip()}, "
                    "which runs; wait for it or end it."
                ) from None
            except OSError:
                pass  # no locks on this file system
            else:
                with writing(self.path / ".lock"):
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                    file.flush()
            yield

    @property
    def holder(self) -> str | None:
        """The process that trains in this folder now; None if there is none, or the file system has no locks."""
        # Queries the lock instead of taking it: taking it could make a run fail that starts at this moment.
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of Linux
        try:
            with open(self.path / ".lock", encoding="utf-8") as file:
                kind = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
                return None if kind == fcntl.F_UNLCK else file.read().strip() or "a process"
        except OSError:
            return None

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml`` atomically: another process sees either the old text or the new one."""
        replace_file(self.config, text)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Writes ``run.json`` atomically."""
        replace_file(self.info, json.dumps(dict(info), indent=2) + "\n")

    def read_info(self) -> dict[str, Any]:
        """Reads ``run.json``.

        Raises  ConfigError if the file is missing, is not a JSON object, or has an entry of the wrong type
        """
        try:
            info = json.loads(self.info.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.info}  cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise ConfigError(f"{self.info}  must be a JSON object: got {type(info).__name__}")
        for name, kind in _INFO.items():
            if not isinstance(info.get(name, kind()), kind):
                raise ConfigError(f"{self.info}  {name} must be a {kind.__name__}: got {info[name]!r}")
        return info


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


def free_space(path: Path) -> str:
    """The free space on the disk of ``path``, in words."""
    try:
        usage = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError:
        return "the disk's free space is unknown"
    return f"{usage.free / 2**30:.2f} GiB free of {usage.total / 2**30:.2f} GiB on that disk"


def replace_file(path: Path, text: str) -> None:
    """Writes a file atomically: another process sees either the old text or the new one.

    Raises  RunFolderError
    """
    # The draft is in the same folder, because a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with writing(path):
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)


def _make(path: Path) -> bool:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # fails if the folder exists: of two racing runs, one gets it
        except FileExistsError:
            return False
    return True
