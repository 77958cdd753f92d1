"""The folder of one run: its name, the paths in it, and its lock."""

from __future__ import annotations

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
from typing import Any, BinaryIO

from llmrl.errors import ConfigError, RunFolderError, closest
from llmrl.run.files import open_file, read_text, replace_file, writing
from llmrl.run.yaml_source import Source

__all__ = ["RunDir"]

_OF_A_RUN = {"config.yaml", "run.json", ".lock", "metrics.jsonl", "rollouts", "checkpoints", "base"}
_OF_A_RUN |= {"report.html", "error.txt"}
_OF_OPTIONS = {"tensorboard", "wandb", "mlflow"}  # what a run writes besides, with the settings log and profile
_PROFILE = re.compile(r"profile-rank\d+\.json")
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

        The default ``name`` is the recipe's name and four digits of a hash of the configuration and the time. A
        folder whose run ended before its first step is used again.

        Raises  ConfigError if ``name`` is taken or cannot be a folder's name; RunFolderError if no folder can be made
        """
        root = Path(root)
        if name is not None:
            if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
                raise ConfigError(f"--name  must be letters, digits and . _ + = -: got {name!r}")
            run = cls(root / name)
            if _make(run.path) or (run._never_began and run._make_again()):
                return run
            raise ConfigError(
                f"--name  {root / name} exists; choose another name, or continue it: llmrl resume {root / name}, or "
                "replace it: --overwrite"
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

        Raises  RunFolderError that names the process that holds the lock, or a link in the folder, or if the folder
                cannot be written
        """
        self._refuse_links()
        with writing(self.path / ".lock"):
            file = open_file(self.path / ".lock", "a+b")
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise RunFolderError(
                    f"{self.path}: must have one process at a time: got a second one, beside {_holder(file)}, "
                    "which runs; wait for it or end it."
                ) from None
            except OSError:
                pass  # no locks on this file system
            else:
                with writing(self.path / ".lock"):
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                    file.flush()
            yield

    @property
    def holder(self) -> str | None:
        """The process that trains in this folder now; None if there is none, or the file system has no locks."""
        # Queries the lock instead of taking it: taking it could make a run fail that starts at this moment.
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of Linux
        try:
            with open_file(self.path / ".lock") as file:
                kind = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
                return None if kind == fcntl.F_UNLCK else _holder(file)
        except OSError:
            return None

    @property
    def _never_began(self) -> bool:
        """True for the folder of a run that ended before its first step, by an error say."""
        if self.path.is_symlink() or not self.config.is_file() or not (self.path / ".lock").is_file():
            return False  # without a lock file it may be about to begin
        if {entry.name for entry in self.path.iterdir()} - _OF_A_RUN or any(self.checkpoints.glob("*")):
            return False
        try:
            logged = read_text(self.metrics).splitlines() if self.metrics.exists() else []
            # An evaluation before the first step is logged as step 0.
            stepped = len(logged) > 1 or any(json.loads(line)["step"] for line in logged)
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return not stepped and self.holder is None

    def remove(self) -> str:
        """Removes the run with its checkpoints; returns what was removed, in words.

        Raises  ConfigError for a folder that is not a run, or has in it what no run writes; RunFolderError if a process
                trains in it
        """
        if self.path.is_symlink() or not (self.config.is_file() and (self.info.is_file() or self._never_began)):
            raise ConfigError(
                f"--overwrite  {self.path} is not a run, which has a config.yaml and a run.json; choose another name"
            )
        names = {entry.name for entry in self.path.iterdir()} - _OF_A_RUN - _OF_OPTIONS
        if others := sorted(name for name in names if not _PROFILE.fullmatch(name)):
            raise ConfigError(
                f"--overwrite  {self.path} has {', '.join(others[:3])}, which no run writes; move that away, or choose "
                "another name"
            )
        with self.lock(), writing(self.path):
            saved = sorted(entry.name for entry in self.checkpoints.glob("step*"))
            shutil.rmtree(self.path)
        return f"removed the run {self.path} with {', '.join(saved) or 'no checkpoint'}"

    def _make_again(self) -> bool:
        with writing(self.path):
            shutil.rmtree(self.path)
        return _make(self.path)

    def _refuse_links(self) -> None:
        """Raises RunFolderError for a link: training would write or remove what it leads to."""
        with writing(self.path):
            links = sorted(entry.name for entry in self.path.iterdir() if entry.is_symlink())
        if links:
            raise RunFolderError(
                f"{self.path}: must hold files and folders of its own: {links[0]!r} is a link; put a copy there, or "
                "link the whole run folder."
            )

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml`` atomically: another process sees either the old text or the new one."""
        replace_file(self.config, text)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Writes ``run.json`` atomically."""
        replace_file(self.info, json.dumps(dict(info), indent=2) + "\n")

    def read_config(self) -> Source:
        """Reads ``config.yaml``. Raises ConfigError."""
        return Source.read(self.config, links=False)

    def read_info(self) -> dict[str, Any]:
        """Reads ``run.json``.

        Raises  ConfigError if the file is missing, is not a JSON object, or has an entry of the wrong type
        """
        try:
            info = json.loads(read_text(self.info))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.info}  cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise ConfigError(f"{self.info}  must be a JSON object: got {type(info).__name__}")
        for name, kind in _INFO.items():
            if not isinstance(info.get(name, kind()), kind):
                raise ConfigError(f"{self.info}  {name} must be a {kind.__name__}: got {info[name]!r}")
        return info


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(200).decode("utf-8", "replace").strip() or "a process"


def _make(path: Path) -> bool:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # fails if the folder exists: of two racing runs, one gets it
        except FileExistsError:
            return False
    return True
