"""Calls as Qwen 3 Coder writes them: ``<function=name>``, a ``<parameter=x>`` per argument, values as plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, shown
from llmrl.strict_json import read_json

__all__ = ["FunctionFormat"]

_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_VALUE_END = re.compile(r"\n?</parameter>|(?=\n?<parameter=|\n?</function>)")
_CLOSE = re.compile(r"\s*</function>")
_NEXT = re.compile(r"</function>|<function=")
_AMBIGUOUS = re.compile(r"</?(?:parameter|function)")


class FunctionFormat(CallFormat):
    """``<function=name>`` ``<parameter=x>`` value ``</parameter>`` ... ``</function>``, in ``<tool_call>`` tags or not.

    A value is text if the tool's schema says "string"; otherwise it is JSON where it can be, and text where it cannot.
    Text that holds the format's own tags is written as a JSON string.

    >>> FunctionFormat().parse("<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>")
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "function"
    in_templates = True
    opening = re.compile(r"<function=([^<>\n]*)>")
    example = "<function=<tool>>\n<parameter=<name>>\nvalue\n</parameter>\n</function>"

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{_value_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        name = opening[1].strip()
        properties = schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        place = opening.end()
        while parameter := _PARAMETER.match(text, place):
            key = parameter[1].strip()
            start = parameter.end() + (text[parameter.end() : parameter.end() + 1] == "\n")
            # an empty value has one line end where a longer one has two
            end = _VALUE_END.search(text, max(parameter.end(), start - 1))
            if end is None:
                return self._malformed(f"the value of {key!r} does not end with </parameter>", name), len(text)
            arguments[key] = _value(text[start : max(start, end.start())], properties.get(key, {}))
            place = end.end()
        close = _CLOSE.match(text, place)
        if close is None:
            reason = f"{shown(text, place)} stands where <parameter=...> or </function> should"
            return self._malformed(reason, name), self._skip(text, place)
        if not name:
            return self._malformed("it names no tool"), close.end()
        return [ParsedCall(name, arguments)], close.end()

    def _skip(self, text: str, place: int) -> int:
        """Past a call that cannot be read: where it is closed, or where the next one opens."""
        following = _NEXT.search(text, place)
        return following.start() if following else len(text)


def _value_text(value: Any) -> str:
    """Text where it is read back as itself, else JSON."""
    if isinstance(value, str) and not _AMBIGUOUS.search(value) and _value(value, {}) == value:
        return value
    return json_text(value).replace("<", "\\u003c")


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        value, end = read_json(text, 0)
    except ValueError:
        return text
    return value if not text[end:].strip() else text
