"""A buffer on disk: a directory with one folder per part, written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmrl.data.replay_buffers.directory import current_directory, replace_directory
from llmrl.data.replay_buffers.stages import Stage
from llmrl.errors import CheckpointError

_FORMAT = 2


def dump_parts(path: Path, parts: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Writes storage, sampler, writer and the states of the transforms; replaces an older dump once this is whole."""
    with replace_directory(path) as folder:
        for name, part in parts.items():
            part.dumps(folder / name)
        torch.save([stage.state() for stage in stages], folder / "transform.t")
        metadata = {"format": _FORMAT, "parts": part_names(parts), "transforms": len(stages)}
        (folder / "buffer_metadata.json").write_text(json.dumps(metadata, indent=1))


def load_parts(path: Path, parts: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Reads what ``dump_parts`` wrote into parts of the same kinds.

    Raises: CheckpointError, with nothing changed, if the directory is none or of other parts.
    """
    folder = current_directory(path)
    try:
        metadata = json.loads((folder / "buffer_metadata.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"ReplayBuffer: {path} must be a directory that dumps wrote: {error}.") from error
    expected = part_names(parts)
    if metadata.get("format") != _FORMAT or metadata.get("parts") != expected:
        raise CheckpointError(
            f"ReplayBuffer: a dump is loaded into the same parts: got {metadata.get('parts')} (format "
            f"{metadata.get('format')}), expected {expected} (format {_FORMAT})."
        )
    check_transforms(metadata["transforms"], stages)
    states = torch.load(folder / "transform.t", weights_only=False)
    for name, part in parts.items():
        part.loads(folder / name)
    for stage, state in zip(stages, states, strict=True):
        stage.load(state)


def part_names(parts: dict[str, Any]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def check_transforms(saved: int, stages: Sequence[Stage]) -> None:
    if saved != len(stages):
        raise CheckpointError(
            f"ReplayBuffer: a state is loaded into a buffer with the same transforms: got {saved}, expected "
            f"{len(stages)}."
        )
