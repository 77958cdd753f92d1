"""A buffer on disk: a directory with one folder per part, written atomically.

manifest.json   the parts, and a checksum of every file (``directory.py``)
storage/        the files of the storage's checkpointer, with their own manifest
sampler/        the sampler's state
writer/         the writer's state
transform.t     the states of the transforms
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmrl.data.replay_buffers.utils import Transforms
from llmrl.errors import CheckpointError

_FORMAT, _FORMAT_VERSION = "llmrl.buffer", 4
_TRANSFORMS = "transform.t"


def dump_parts(path: Path, parts: dict[str, Any], transforms: Transforms) -> None:
    """Writes storage, sampler, writer and the states of the transforms; replaces an older dump when it is complete."""
    from llmrl.data.replay_buffers.directory import replace_directory, write_manifest, write_object

    with replace_directory(path) as folder:
        for name, part in parts.items():
            part.dumps(folder / name)
        write_object(transforms.state_dict(), folder / _TRANSFORMS)
        write_manifest(folder, _FORMAT, _FORMAT_VERSION, {"parts": part_names(parts), "transforms": len(transforms)})


def load_parts(path: Path, parts: dict[str, Any], transforms: Transforms) -> None:
    """Reads what ``dump_parts`` wrote, into parts of the same types.

    Raises: CheckpointError, with nothing changed, if the directory is missing or damaged, holds other parts, or does
    not fit.
    """
    from llmrl.data.replay_buffers.directory import read_manifest, read_object, reading_directory

    with reading_directory(path) as folder:
        manifest = read_manifest("ReplayBuffer", folder, _FORMAT, _FORMAT_VERSION)
        absent = [name for name in parts if not any(file.startswith(f"{name}/") for file in manifest["files"])]
        if absent:
            raise CheckpointError(f"ReplayBuffer: {folder} must list the files of every part: got none of {absent}.")
        _check_kinds(manifest["parts"], parts, manifest["transforms"], transforms)
        states = read_object(folder / _TRANSFORMS)
        _load(parts, transforms, lambda name, part: part.loads(folder / name), states)


def parts_state(parts: dict[str, Any], transforms: Transforms) -> dict[str, Any]:
    """The states of parts and transforms, as copies."""
    states = {name: part.state_dict() for name, part in parts.items()}
    return {**states, "parts": part_names(parts), "transforms": transforms.state_dict()}


def load_parts_state(state: dict[str, Any], parts: dict[str, Any], transforms: Transforms) -> None:
    """Loads what ``parts_state`` returned. Raises: CheckpointError or DataError, with nothing changed."""
    missing = {*parts, "parts", "transforms"} - state.keys()
    if missing:
        raise CheckpointError(f"ReplayBuffer: not a buffer state: missing keys {sorted(missing)}, got {sorted(state)}.")
    _check_kinds(state["parts"], parts, len(state["transforms"]), transforms)
    _load(parts, transforms, lambda name, part: part.load_state_dict(state[name]), state["transforms"])


def _load(
    parts: dict[str, Any], transforms: Transforms, load: Callable[[str, Any], None], states: Sequence[Any]
) -> None:
    """Loads all parts or none. The storage is loaded last: its own load is atomic, so its rows need no backup copy."""
    small = {name: part for name, part in parts.items() if name != "storage"}
    before = {name: part.state_dict() for name, part in small.items()}
    # A copy, because a transform's state may contain tensors that it changes in place.
    transforms_before = copy.deepcopy(transforms.state_dict())
    try:
        for name, part in small.items():
            load(name, part)
        transforms.load_state_dict(states)
        load("storage", parts["storage"])
    except BaseException as error:
        for name, part in small.items():
            part.load_state_dict(before[name])
        transforms.load_state_dict(transforms_before)
        if type(error) is KeyError:  # a part's state lacks an entry; a MissingKeyError has its own message
            raise CheckpointError(f"ReplayBuffer: the state is damaged: it lacks {error}.") from error
        raise


def part_names(parts: dict[str, Any]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def _check_kinds(names: dict[str, str], parts: dict[str, Any], num_transforms: int, transforms: Transforms) -> None:
    expected = {**part_names(parts), "transforms": len(transforms)}
    got = {**names, "transforms": num_transforms}
    if got != expected:
        raise CheckpointError(
            f"ReplayBuffer: a saved buffer must be loaded into the same parts and transforms: got {got}, expected "
            f"{expected}."
        )
