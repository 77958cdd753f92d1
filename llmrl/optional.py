"""Imports optional dependencies, or raises with the pip extra to install."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from llmrl.errors import MissingDependencyError


def require(module: str, *, extra: str, used_by: str) -> ModuleType:
    """Imports an optional dependency where it is used; for a dotted name, returns the innermost module.

    Raises   MissingDependencyError if the package is not installed. A package that is installed but broken (a missing
             sub-module, or a missing dependency) raises its own error.

    >>> require("json", extra="none", used_by="this example").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise _missing(module, extra, used_by) from error


def check_installed(module: str, *, extra: str = "", packages: str = "", used_by: str) -> None:
    """Raises what `require` raises for a package that is not installed; imports nothing.

    ``packages``: what pip installs, for one that no extra of llmrl has
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:  # without an origin: a folder of that name here, such as wandb/
        raise _missing(module, extra, used_by, packages)


def _missing(module: str, extra: str, used_by: str, packages: str = "") -> MissingDependencyError:
    names = " ".join(f"'{name}'" for name in (packages or f"llmrl[{extra}]").split())
    package = module.partition(".")[0]
    return MissingDependencyError(
        f"{used_by}: needs the package {package!r}, which is not installed; run: pip install {names}.", name=package
    )
