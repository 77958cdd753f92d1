"""Reads JSON from models, servers and files: every error is a `JSONError`, found in time linear in the text.

The standard library's decoder also raises RecursionError, and its errors count lines from the start of the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64  # nesting of lists and objects; templates and copies recurse into the values
_MAX_SHOWN = 80
_WINDOW = 4096  # characters; a value that does not fit is read again in a larger window
_LONGEST_ESCAPE = 16  # this close to the end of a window, the cut may have caused an error


class JSONError(ValueError):
    """Text that is not usable JSON; ``place`` is the index of the offending character."""

    def __init__(self, reason: str, place: int):
        super().__init__(reason)
        self.place = place


def read_json(text: str, place: int = 0) -> tuple[Any, int]:
    """Returns the JSON value at ``place`` (after white space) and its end. NaN and Infinity are not JSON.

    Raises  JSONError with a short reason; also for more than `MAX_DEPTH` levels, an integer with more digits than
            Python converts, and half of a surrogate pair, which tokenizers reject

    >>> read_json('call: {"a": [1, 2]} and more', 6)
    ({'a': [1, 2]}, 19)
    """
    start = _SPACE.match(text, place).end()
    if start == len(text):
        raise JSONError("the arguments are missing", start)
    size = _WINDOW
    # Reads in windows: each JSONDecodeError counts the lines before it, which is quadratic over many places of a long
    # text. The cut may have caused an error near the end of a window, so that is read again in a larger window.
    while True:
        window = text[start : start + size]
        is_all = start + size >= len(text)
        try:
            value, end = _STRICT.raw_decode(window)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos > len(window) - _LONGEST_ESCAPE
            if is_all or not cut:
                shown = window[error.pos : error.pos + _MAX_SHOWN].partition("\n")[0]
                raise JSONError(f"invalid JSON at {shown!r} ({error.msg})", start + error.pos) from None
        except (RecursionError, ValueError) as error:
            raise _unusable(error, window, start, start + 1) from None
        else:
            if is_all or end < len(window):
                _check(value, start + end)
                return value, start + end
        size *= 4


def parse_json(text: str) -> Any:
    """Returns the value of a whole text as `json.loads` does (NaN and Infinity included).

    Raises  JSONError like `read_json`

    >>> parse_json("[" * 100 + "]" * 100)
    Traceback (most recent call last):
    llmrl.strict_json.JSONError: the JSON is nested too deeply (over 64 levels)
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise JSONError(str(error), error.pos) from None
    except (RecursionError, ValueError) as error:
        raise _unusable(error, text, 0, 0) from None
    _check(value, 0)
    return value


def _check(value: Any, place: int) -> None:
    """Raises JSONError for a value nested too deeply, or with text that cannot be encoded."""
    # Level by level, not recursively: deep nesting could exceed the recursion limit.
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, str):
                if not entry.isascii() and _SURROGATE.search(entry):
                    raise JSONError("it holds half of a surrogate pair (\\ud800 to \\udfff)", place)
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, dict):
                inner += entry
                inner += entry.values()
        depth += any(isinstance(entry, (dict, list)) for entry in level)
        if depth > MAX_DEPTH:
            raise JSONError(_TOO_DEEP, place)
        level = inner


def _unusable(error: Exception, text: str, start: int, place: int) -> JSONError:
    """Returns the error for text that `json` rejects: nested too deeply, NaN or Infinity, or too many digits."""
    if not isinstance(error, RecursionError):
        return JSONError("an integer has too many digits" if "digits" in str(error) else str(error), place)
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            return JSONError(_TOO_DEEP, start + match.start())
    return JSONError(_TOO_DEEP, start + len(text))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_TOO_DEEP = f"the JSON is nested too deeply (over {MAX_DEPTH} levels)"
_STRICT = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"\s*")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
