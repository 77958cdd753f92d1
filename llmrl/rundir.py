"""The folder of one run: its name, and where each file in it lives. What is written into them belongs to others."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError, closest

__all__ = ["RunDir"]


@dataclass(frozen=True)
class RunDir:
    """``runs/<name>/`` and the places in it.

    >>> RunDir(Path("runs/sums-grpo-3f2a")).metrics.as_posix()
    'runs/sums-grpo-3f2a/metrics.jsonl'
    """

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as it ran, every default written out."""
        return self.path / "config.yaml"

    @property
    def info(self) -> Path:
        """What made the run: the command, its arguments, versions."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per step (`llmrl.metrics.MetricsLog`)."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One Parquet file per step (`llmrl.rollouts.RolloutLog`)."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """``stepN`` folders (`llmrl.checkpoint.CheckpointStore`)."""
        return self.path / "checkpoints"

    @classmethod
    def create(
        cls,
        recipe: str,
        config_text: str,
        *,
        root: Path | str = "runs",
        name: str | None = None,
        now: float | None = None,
    ) -> RunDir:
        """Makes a folder that no other run has, even one started in the same moment.

        Without ``name`` it is the recipe's name and four digits of a hash of the configuration and the time.

        Raises  ConfigError if ``name`` is taken or cannot be a folder's name
        """
        root = Path(root)
        if name is not None:
            if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
                raise ConfigError(f"--name  must be letters, digits and . _ + = -: got {name!r}")
            return cls(_make(root / name) or _refuse(root / name))
        stem = re.sub(r"[^a-z0-9.]+", "-", recipe.lower()).strip("-.") or "run"
        moment = time.time_ns()
        for attempt in range(10_000):
            digits = hashlib.sha256(f"{config_text}\0{moment}\0{attempt}".encode()).hexdigest()[:4]
            if path := _make(root / f"{stem}-{digits}"):
                return cls(path)
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
        match = closest(Path(path).name, runs)
        raise ConfigError(
            f"{path}  is not a run: there is no {Path(path) / 'config.yaml'}"
            + (f"\ndid you mean  {Path(root) / match}?" if match else "")
        )

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml``; another process sees the old text or the new one, never half of it."""
        _replace(self.config, text)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Writes ``run.json``, likewise."""
        _replace(self.info, json.dumps(dict(info), indent=2) + "\n")

    def read_info(self) -> dict[str, Any]:
        """Reads ``run.json``.

        Raises  ConfigError if the file is missing or is not JSON
        """
        try:
            return json.loads(self.info.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.info}  cannot be read: {error}") from error


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _make(path: Path) -> Path | None:
    try:
        path.mkdir(parents=True)  # fails where the folder exists: of two racing runs, one gets it
    except FileExistsError:
        return None
    return path


def _refuse(path: Path) -> Path:
    raise ConfigError(f"--name  {path} exists; choose another name, or continue it: llmrl resume {path}")
