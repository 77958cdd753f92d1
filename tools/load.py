"""From the name of a tool in a configuration to the tool."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object
from llmrl.tools.base import Tool
from llmrl.tools.function import as_tool, check_constructor

__all__ = ["BUILT_IN", "check_tool", "load_tool"]

BUILT_IN = {
    "browser": "llmrl.tools.browser:BrowserTool",
    "calculator": "llmrl.tools.calculator:calculator",
    "mcp": "llmrl.tools.mcp_client:MCPTool",
    "python": "llmrl.tools.python:PythonTool",
    "search_documents": "llmrl.tools.search:SearchDocuments",
}


def load_tool(name: str, settings: Mapping[str, Any] | None = None) -> Tool:
    """The tool that a configuration names: one built in, or ``"my_package.my_module:attribute"``.

    The attribute may be a tool, a subclass of `Tool`, a function, or a class with ``__call__``. ``settings`` are the
    keyword arguments of a class. Modules of the working directory are found.

    Raises   ConfigError naming what is not there, with the nearest name that is

    >>> load_tool("calculator").call({"expression": "2 * 21"}, conversation=0, deadline=float("inf"))
    '42'
    """
    target = _target(name, settings or {})
    return as_tool(target(**(settings or {})) if _is_made(target, settings) else target)


def check_tool(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Raises what `load_tool` would raise for the name, the settings and the signature; starts nothing."""
    target = _target(name, settings or {})
    if not _is_made(target, settings):
        as_tool(target)


def _target(name: str, settings: Mapping[str, Any]) -> Any:
    """What the name stands for: something that takes the settings, if there are any."""
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(
            f"tool: must be one of {', '.join(sorted(BUILT_IN))}, or 'package.module:name': got {name!r}."
            + did_you_mean(name, BUILT_IN)
        )
    target = load_object(BUILT_IN.get(name, name), what="tool")
    if _is_made(target, settings):
        check_constructor(target, settings, f"tool: {name!r}")
    elif settings:
        raise ConfigError(f"tool: {name!r} takes no settings: got {', '.join(map(repr, settings))}.")
    return target


def _is_made(target: Any, settings: Mapping[str, Any] | None) -> bool:
    """Whether the target is a class that one tool is made of; any other class has an object per conversation."""
    return inspect.isclass(target) and (bool(settings) or issubclass(target, Tool))
