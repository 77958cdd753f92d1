"""Names of a package that are loaded when they are first used, so that importing it loads only what a program needs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the ``__init__`` of ``package``.

    The names are those that the file imports under ``if TYPE_CHECKING:``, where type checkers and readers find them
    too; ``from ... import *`` stands for the ``__all__`` of a package that is itself loaded on demand. Sub-modules are
    found as well.

    >>> from llmrl import data
    >>> data.ListStorage.__module__
    'llmrl.data.replay_buffers.storages.row_list'
    """
    module, homes = sys.modules[package], _homes(package)

    def load(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(module, name, value)  # the next use finds it without a call
        return value

    return load, lambda: sorted({*module.__all__, *(name for name in vars(module) if name.startswith("__"))})


def _homes(package: str) -> dict[str, str]:
    """The module of each name that is imported under ``if TYPE_CHECKING:``."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    homes = {}
    for block in ast.parse(source).body:
        if not (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"):
            continue
        for statement in block.body:
            assert isinstance(statement, ast.ImportFrom), f"{package}: only 'from package.module import name' is read"
            names = [alias.name for alias in statement.names]
            if names == ["*"]:
                names = importlib.import_module(statement.module).__all__
            homes |= dict.fromkeys(names, statement.module)
    return homes
