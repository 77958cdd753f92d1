"""Resolves the setting ``model``: a folder, a model of the hub, or the checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from llmrl.errors import ConfigError, DataError
from llmrl.hub import check_folder
from llmrl.run.checkpoint import latest_checkpoint
from llmrl.run.run_dir import RunDir

Sizes = TypeVar("Sizes")  # of a model that is made, not read


def resolve_model(model: str | Sizes, *, runs: Path, setting: str = "model") -> str | Sizes:
    """Resolves ``latest:RECIPE`` to the newest checkpoint of that recipe in ``runs``, a run's folder to its last one,
    and ``~``; anything but text is returned as it is.

    Raises  DataError if there is no checkpoint, or no such folder and the hub cannot have such a name
    """
    if not isinstance(model, str):
        return model
    if RunDir(path := Path(model).expanduser()).config.exists():
        if (checkpoint := latest_checkpoint(path)) is None:
            raise DataError(f"{setting} {model}: the run must have left a checkpoint: there is none.")
        return str(checkpoint)
    if not model.startswith("latest:"):
        return str(path) if check_folder(model, setting=setting) else model
    recipe = model.removeprefix("latest:")
    found = []
    for config in runs.glob("*/config.yaml"):
        run = RunDir(config.parent)
        try:
            same = run.read_info().get("recipe") == recipe
        except ConfigError:
            continue
        if same and (checkpoint := latest_checkpoint(run.path)):
            found.append((checkpoint.stat().st_mtime, checkpoint))
    if not found:
        raise DataError(
            f"{setting} {model}: a run of {recipe} with a checkpoint must be in {runs}/: there is none; make one with "
            f"llmrl sft {recipe}, or set model=FOLDER."
        )
    return str(max(found)[1])
