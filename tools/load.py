"""Loads tools by the names used in configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object
from llmrl.tools.base import Tool
from llmrl.tools.function import as_tool, check_constructor

BUILT_IN = {
    "browser": "llmrl.tools.browser:BrowserTool",
    "calculator": "llmrl.tools.calculator:calculator",
    "mcp": "llmrl.tools.mcp_client:MCPTool",
    "python": "llmrl.tools.python:PythonTool",
    "search_documents": "llmrl.tools.search:SearchDocuments",
}


def load_tool(name: str, settings: Mapping[str, Any] | None = None) -> Tool:
    """A built-in tool by its name, or the one that ``"my_package.my_module:attribute"`` names.

    The attribute may be a tool, a subclass of `Tool`, a function, or a class with ``__call__``. ``settings`` are the
    keyword arguments of a class. Modules in the working directory can be imported.

    Raises   ConfigError that names the missing tool or attribute, with the nearest existing name

    >>> load_tool("calculator").call({"expression": "2 * 21"}, conversation=0, deadline=float("inf"))
    '42'
    """
    target, is_constructor = _find(name, settings or {})
    return as_tool(target(**(settings or {})) if is_constructor else target)


def check_tool(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Raises what `load_tool` would raise for the name, the settings and the signature; starts nothing."""
    target, is_constructor = _find(name, settings or {})
    if not is_constructor:
        as_tool(target)


def _find(name: str, settings: Mapping[str, Any]) -> tuple[Any, bool]:
    """The named object, and True if it is a class to be called with the settings."""
    if name not in BUILT_IN and ":" not in name:
        names, hint = ", ".join(sorted(BUILT_IN)), did_you_mean(name, BUILT_IN)
        raise ConfigError(f"tool: must be one of {names}, or 'package.module:name': got {name!r}.{hint}")
    target = load_object(BUILT_IN.get(name, name), what="tool")
    # A non-Tool class without settings is instantiated once per conversation.
    is_constructor = inspect.isclass(target) and (bool(settings) or issubclass(target, Tool))
    if is_constructor:
        check_constructor(target, settings, f"tool: {name!r}")
    elif settings:
        raise ConfigError(f"tool: {name!r} takes no settings: got {', '.join(map(repr, settings))}.")
    return target, is_constructor
