"""``manifest.json``: what a folder of a checkpoint is, and a checksum of every file in it, itself included.

A sub-folder with a manifest of its own vouches for its files; the outer one lists only that manifest.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmrl.errors import CheckpointError

__all__ = ["MANIFEST", "read_manifest", "write_manifest"]

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def write_manifest(folder: Path, kind: str, number: int, content: dict[str, Any]) -> None:
    """Closes ``folder``: no file in it may change from now on.

    ``kind`` and ``number`` name the format and its version.
    """
    manifest = {"format": kind, "format_version": number, "llmrl": _version(), **content}
    manifest["files"] = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in _files(folder)
    }
    manifest["checksum"] = _own_digest(manifest)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()]
    (folder / MANIFEST).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_manifest(who: str, folder: Path, kind: str, number: int) -> dict[str, Any]:
    """The manifest of a folder in which every file is what was written.

    Raises  CheckpointError that names the file, if one is missing, too short or changed, or if the format is another
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{who}: {folder} must be a checkpoint of ours: it has no {MANIFEST}; check the path, or load it with what "
            "wrote it."
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(_damaged(who, file, f"it cannot be read ({error})")) from error
    if (manifest.get("format"), manifest.get("format_version")) != (kind, number):
        raise CheckpointError(
            f"{who}: {folder} must hold {kind} in format version {number}: got {manifest.get('format')} in version "
            f"{manifest.get('format_version')}, written by llmrl {manifest.get('llmrl')}; check the path, or load it "
            "with that version, ``torch.save`` its state_dict() there and give that to load_state_dict here."
        )
    if manifest.get("checksum") != _own_digest(manifest):
        raise CheckpointError(_damaged(who, file, "it was changed"))
    for name, expected in manifest["files"].items():
        part = folder / name
        if not part.is_file():
            raise CheckpointError(_damaged(who, part, "it is missing"))
        size = part.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(_damaged(who, part, f"it has {size} bytes, expected {expected['bytes']}"))
        if _digest(part) != expected["sha256"]:
            raise CheckpointError(_damaged(who, part, "its checksum differs"))
    return manifest


@cache
def _version() -> str:
    return version("llmrl")


def _damaged(who: str, file: Path, what: str) -> str:
    return f"{who}: the checkpoint is damaged: {file}: {what}; load an older one, or copy it again."


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            found += [entry / MANIFEST] if (entry / MANIFEST).exists() else _files(entry)
        elif entry.name != MANIFEST:
            found.append(entry)
    return found


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _own_digest(manifest: dict[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
