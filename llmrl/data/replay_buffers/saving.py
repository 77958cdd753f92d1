"""A buffer on disk: a directory with one folder per part, written completely or not at all.

manifest.json   the parts, and a checksum of every file (``checkpointers/manifest.py``)
storage/        what the storage's checkpointer writes, with a manifest of its own
sampler/        their states
writer/
transform.t     the states of the transforms
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmrl.data.replay_buffers.checkpointers.manifest import read_manifest, write_manifest
from llmrl.data.replay_buffers.directory import current_directory, replace_directory
from llmrl.data.replay_buffers.stages import Stage
from llmrl.errors import CheckpointError

_FORMAT, _FORMAT_VERSION = "llmrl.buffer", 3
_TRANSFORMS = "transform.t"


def dump_parts(path: Path, parts: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Writes storage, sampler, writer and the states of the transforms; replaces an older dump once this is whole."""
    with replace_directory(path) as folder:
        for name, part in parts.items():
            part.dumps(folder / name)
        torch.save([stage.state() for stage in stages], folder / _TRANSFORMS)
        write_manifest(folder, _FORMAT, _FORMAT_VERSION, {"parts": part_names(parts), "transforms": len(stages)})


def load_parts(path: Path, parts: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Reads what ``dump_parts`` wrote into parts of the same kinds.

    Nothing is loaded before every file is known to be what was written; the storage, which is all or nothing itself and
    checks its own files, comes last. Raises: CheckpointError, with nothing changed, if the directory is none, damaged
    or of other parts, or does not fit.
    """
    folder = current_directory(path)
    manifest = read_manifest("ReplayBuffer", folder, _FORMAT, _FORMAT_VERSION)
    expected = part_names(parts)
    if manifest["parts"] != expected:
        raise CheckpointError(
            f"ReplayBuffer: a dump is loaded into the same parts: got {manifest['parts']}, expected {expected}."
        )
    check_transforms(manifest["transforms"], stages)
    states = torch.load(folder / _TRANSFORMS, weights_only=False)
    small = {name: part for name, part in parts.items() if name != "storage"}
    before = {name: part.state_dict() for name, part in small.items()}
    stages_before = [copy.deepcopy(stage.state()) for stage in stages]
    try:
        for name, part in small.items():
            part.loads(folder / name)
        for stage, state in zip(stages, states, strict=True):
            stage.load(state)
        parts["storage"].loads(folder / "storage")
    except BaseException:
        for name, part in small.items():
            part.load_state_dict(before[name])
        for stage, state in zip(stages, stages_before, strict=True):
            stage.load(state)
        raise


def part_names(parts: dict[str, Any]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def check_transforms(saved: int, stages: Sequence[Stage]) -> None:
    if saved != len(stages):
        raise CheckpointError(
            f"ReplayBuffer: a state is loaded into a buffer with the same transforms: got {saved}, expected "
            f"{len(stages)}."
        )
