"""From the name of a tool in a configuration to the tool."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from llmrl.errors import ConfigError, near
from llmrl.tools.base import Tool
from llmrl.tools.function import as_tool, check_constructor

__all__ = ["BUILT_IN", "load_tool"]

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
    path = BUILT_IN.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"load_tool: must be one of {', '.join(sorted(BUILT_IN))}, or 'package.module:name': got {name!r}."
            + near(name, BUILT_IN)
        )
    module = _import(module_name, name)
    target = getattr(module, attribute, None)
    if target is None:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"load_tool: module {module_name!r} has no {attribute!r}.{near(attribute, public)}")
    if inspect.isclass(target) and (settings or issubclass(target, Tool)):
        check_constructor(target, settings or {}, f"load_tool: {name!r}")
        target = target(**(settings or {}))
    elif settings:
        raise ConfigError(f"load_tool: {name!r} takes no settings: got {', '.join(map(repr, settings))}.")
    return as_tool(target)


def _import(module_name: str, name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there
        importlib.invalidate_caches()
        return _import(module_name, name)
    raise ConfigError(
        f"load_tool: {name!r}: there is no module {module_name!r}, neither installed nor in {os.getcwd()}."
    )
