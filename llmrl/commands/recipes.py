"""The training commands with their settings and loops; the settings and checkpoints of a run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from llmrl.concurrency.folder_lock import locked
from llmrl.errors import ConfigError, DataError
from llmrl.loading import load_object
from llmrl.run.checkpoint import latest_checkpoint
from llmrl.run.config import Loaded, load_config
from llmrl.run.run_dir import RunDir


@dataclass(frozen=True)
class Recipe:
    """A training command: the names of its settings class (importable without torch) and of its loop's module, and what
    it does.
    """

    settings_name: str
    module: str
    about: str = ""

    def settings(self) -> type[Any]:
        return load_object(self.settings_name, what="settings")

    def loop(self) -> Any:
        return importlib.import_module(self.module)


_DECLARED = re.compile(r'^SETTINGS = "([\w.:]+)"\nABOUT = "([^"]+)"$', re.MULTILINE)


def _find_recipes() -> dict[str, Recipe]:
    """The files of `llmrl.recipes` that declare their settings; they are read, since importing one loads torch."""
    found = {}
    for path in sorted(Path(str(resources.files("llmrl.recipes"))).glob("*.py")):
        if declared := _DECLARED.search(path.read_text(encoding="utf-8")):
            found[path.stem] = Recipe(declared[1], f"llmrl.recipes.{path.stem}", declared[2])
    return found


RECIPES = _find_recipes()


def load_run(
    run: RunDir, overrides: Sequence[str] = (), *, read: Collection[str] = ()
) -> tuple[Recipe, dict[str, Any], Loaded]:
    """The recipe of a run, the content of its ``run.json``, and its settings with ``overrides``; see `load_config`.

    Raises  ConfigError for a file that cannot be read or an unknown setting
    """
    info = run.read_info()
    if info.get("command") not in RECIPES:
        raise ConfigError(f"{run.info}  must name the command {' or '.join(RECIPES)}: got {info.get('command')!r}")
    recipe = RECIPES[info["command"]]
    return recipe, info, load_config(recipe.settings(), run.read_config(), overrides, written=True, read=read)


@contextmanager
def reading_checkpoint(run: RunDir, name: str | None = None) -> Iterator[Path]:
    """The checkpoint of that name, or the last one; a run that trains does not remove it inside the block.

    Raises  DataError that lists the existing ones
    """
    with ExitStack() as held:
        while True:
            checkpoint = run.checkpoints / name if name else latest_checkpoint(run.path)
            if checkpoint is None or not checkpoint.is_dir():
                there = ", ".join(sorted(path.name for path in run.checkpoints.glob("step*"))) or "none"
                raise DataError(
                    f"{run.path}: must have the requested checkpoint: got {name or 'the last'}, there: {there}."
                )
            with suppress(FileNotFoundError):  # removed meanwhile: the run has a newer one
                held.enter_context(locked(checkpoint, shared=True))
                break
        yield checkpoint
