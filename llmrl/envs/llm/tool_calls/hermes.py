"""Calls as Hermes and Qwen models write them: a JSON object with name and arguments between ``<tool_call>`` tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, read_json

__all__ = ["HermesFormat", "call_from_object"]

_CLOSE = "</tool_call>"
_TAG = re.compile(r"</?tool_call>")
_AFTER = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|$)")


class HermesFormat(CallFormat):
    """``<tool_call>`` {"name": ..., "arguments": {...}} ``</tool_call>``. A missing last tag is forgiven.

    >>> HermesFormat().parse('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "hermes"
    in_templates = True
    opening = re.compile(r"<tool_call>")
    example = '<tool_call>\n{"name": "<tool>", "arguments": {...}}\n</tool_call>'

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'<tool_call>\n{{"name": {json_text(name)}, "arguments": {json_text(dict(arguments))}}}\n{_CLOSE}'

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[ParsedCall | None, int]:
        try:
            value, end = read_json(text, opening.end())
        except ValueError as error:
            return self._malformed(str(error)), self._skip(text, opening.end())
        after = _AFTER.match(text, end)
        if after is None:
            reason = f"{text[end:].strip()[:40]!r} stands between the JSON object and {_CLOSE}"
            return self._malformed(reason), self._skip(text, end)
        name, arguments, reason = call_from_object(value)
        return (self._malformed(reason, name) if reason else ParsedCall(name, arguments)), after.end()

    def _skip(self, text: str, place: int) -> int:
        """Past a call that cannot be read: after its closing tag, or where the next one opens."""
        tag = _TAG.search(text, place)
        if tag is None:
            return len(text)
        return tag.end() if tag[0] == _CLOSE else tag.start()


def call_from_object(value: Any) -> tuple[str, dict[str, Any] | None, str]:
    """Name, arguments and what is wrong ("" if nothing) of a JSON value that should be a call.

    The arguments may be called "arguments" or "parameters", be a JSON object or the text of one, and be left out.

    >>> call_from_object({"name": "add", "parameters": {"a": 1}})
    ('add', {'a': 1}, '')
    >>> call_from_object([1])[2]
    'a call is a JSON object, not a list'
    """
    if not isinstance(value, dict):
        return "", None, f"a call is a JSON object, not {_KINDS.get(type(value), 'something else')}"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", None, 'the JSON object has no "name"' if name is None else '"name" must be a string'
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments, _ = read_json(arguments, 0)
        except ValueError as error:
            return name, None, f'"arguments": {error}'
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        return name, None, f'"arguments" must be a JSON object, not {_KINDS.get(type(arguments), "something else")}'
    return name, arguments, ""


_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_KINDS[type(None)] = "null"
