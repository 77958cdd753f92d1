"""Calls as Hermes and Qwen models write them: a JSON object with name and arguments between ``<tool_call>`` tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, shown
from llmrl.strict_json import read_json

__all__ = ["HermesFormat"]

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

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        try:
            value, end = read_json(text, opening.end())
        except ValueError as error:
            return self._malformed(str(error)), self._skip(text, opening.end())
        after = _AFTER.match(text, end)
        if after is None:
            reason = f"{shown(text, end)} stands between the JSON object and {_CLOSE}"
            return self._malformed(reason), self._skip(text, end)
        return self._of_object(value), after.end()

    def _skip(self, text: str, place: int) -> int:
        """Past a call that cannot be read: after its closing tag, or where the next one opens."""
        tag = _TAG.search(text, place)
        if tag is None:
            return len(text)
        return tag.end() if tag[0] == _CLOSE else tag.start()
