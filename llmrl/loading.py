"""Loads user objects (tools, rewards, environments, call formats) that settings name as "package.module:name"; names
the place where user code failed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from llmrl.errors import ConfigError, did_you_mean

__all__ = ["load_function", "load_object", "split_name", "user_place", "user_traceback"]

_MAX_LISTED = 12
_OWN = str(Path(__file__).parent)
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")), "<frozen ")


def load_object(name: str, *, what: str) -> Any:
    """Returns the object that ``"package.module:name"`` names; the module may be in the working directory.

    ``what`` names the object in messages.
    Raises  ConfigError if the name has another form, the module cannot be found or imported, or has no such object

    >>> load_object("math:pi", what="number")
    3.141592653589793
    >>> load_object("math:pie", what="number")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    llmrl.errors.ConfigError: number: module 'math' has no 'pie': it has ... Did you mean 'pi'?
    """
    module_name, attribute = split_name(name, what=what)
    module = _import(module_name, what)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        own = [known for known in public if getattr(vars(module)[known], "__module__", None) == module_name]
        listed = ", ".join((own or public)[:_MAX_LISTED]) or "nothing"
        raise ConfigError(
            f"{what}: module {module_name!r} has no {attribute!r}: it has {listed}.{did_you_mean(attribute, public)}"
        ) from None
    except Exception as error:  # from a module's own __getattr__
        raise ConfigError(f"{what}: reading {attribute!r} of {module_name!r} failed: {_reason(error)}.") from error


def load_function(name: str, *, what: str) -> Callable[..., Any]:
    """Like `load_object`. Also raises ConfigError for an object that is not callable."""
    function = load_object(name, what=what)
    if not callable(function):
        raise ConfigError(f"{what}: {name!r} must be a function: it is of type {type(function).__name__}.")
    return function


def split_name(name: str, *, what: str) -> tuple[str, str]:
    """Returns the module and the name within it. Raises ConfigError for another form; imports nothing.

    >>> split_name("my_pkg.rewards:exact", what="reward")
    ('my_pkg.rewards', 'exact')
    """
    module_name, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{what}: must be 'package.module:name': got {name!r}.")
    return module_name, attribute


def user_traceback(error: BaseException) -> str:
    """The traceback of an error from the first frame of user code that llmrl called; all of it if there is none."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list(part.stack[_first_of_user(part.stack) or 0 :])
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(shown.format())


def user_place(error: BaseException) -> str | None:
    """The line of user code, called by llmrl, that raised the error, itself or in a library; None if llmrl did."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not _is_of_library(frame.filename)][-1:]
    if _first_of_user(frames) is None or last[0].filename.startswith(_OWN):
        return None
    return f"{last[0].filename}:{last[0].lineno}, in {last[0].name}"


def _first_of_user(frames: traceback.StackSummary) -> int | None:
    called = False
    for number, frame in enumerate(frames):
        is_own = frame.filename.startswith(_OWN)
        if called and not is_own and not _is_of_library(frame.filename):
            return number
        called = called or is_own
    return None


def _is_of_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)


def _import(module_name: str, what: str) -> ModuleType:
    # At the end of the path, so that a local file never shadows an installed module.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a console script does not search it
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):  # the module exists, but one of its imports does not
            raise ConfigError(f"{what}: importing {module_name!r} failed: {_reason(error)}.") from error
        raise ConfigError(
            f"{what}: there is no module {missing!r}, neither installed nor in {os.getcwd()}.{_near_module(missing)}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, and may end with sys.exit
        raise ConfigError(f"{what}: importing {module_name!r} failed: {_reason(error)}.") from error


def _reason(error: BaseException) -> str:
    """Returns the exception's text and the line of user code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # its text names the line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f", at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"


def _near_module(missing: str) -> str:
    parent, _, leaf = missing.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", []) if parent else [os.getcwd()]
    return did_you_mean(leaf, [found.name for found in pkgutil.iter_modules(folders)])
