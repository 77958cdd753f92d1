"""Calls between ``<tool>`` tags: the name, a line end, the arguments as JSON. And calls by a pattern of one's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text
from llmrl.errors import ConfigError
from llmrl.strict_json import read_json

__all__ = ["PatternFormat", "TaggedFormat"]

_CLOSE = "</tool>"
_TAG = re.compile(r"</tool>|<tool[\s>]")
_AFTER = re.compile(r"\s*(?:</tool>|$)")
_NAME = re.compile(r"\s*([^\s{<]+)[ \t]*")


class TaggedFormat(CallFormat):
    """``<tool>name`` line end ``{...}</tool>``, or ``<tool name="name">{...}</tool>``. No arguments mean none.

    >>> TaggedFormat().parse('Let me see. <tool>add\\n{"a": 1}</tool>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "tagged"
    opening = re.compile(r"<tool(?:\s[^<>\n]*)?>")
    example = '<tool><name>\n{"argument": value}</tool>'

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool>{name}\n{json_text(dict(arguments))}{_CLOSE}"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        place = opening.end()
        attribute = _ATTRIBUTE.search(opening[0])
        name = attribute[1] if attribute else ""
        if not attribute:
            found = _NAME.match(text, place)
            if found is None:
                return self._malformed("it names no tool"), self._skip(text, place)
            name, place = found[1], found.end()
        empty = _AFTER.match(text, place)
        if empty:
            return [ParsedCall(name, {})], empty.end()
        return self._of_arguments(name, text, place, _AFTER, _CLOSE)

    def _skip(self, text: str, place: int) -> int:
        """Past a call that cannot be read: after its closing tag, or where the next one opens."""
        tag = _TAG.search(text, place)
        if tag is None:
            return len(text)
        return tag.end() if tag[0] == _CLOSE else tag.start()


class PatternFormat(CallFormat):
    """Calls by a regular expression of the user's, whose first group is the tool's name, the second its JSON arguments.

    Raises  ConfigError for a pattern without two groups, or that cannot be compiled

    >>> PatternFormat(r"CALL (\\w+) (\\{.*\\})").parse('CALL add {"a": 1}')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "pattern"

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        try:
            self.opening = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"tool_call_pattern: must be a regular expression: got {pattern!r}: {error}.") from error
        if self.opening.groups < 2:
            raise ConfigError(
                f"tool_call_pattern: must have two groups, the tool's name and its JSON arguments: got {pattern!r}."
            )
        self.example = f"what matches {self.opening.pattern}"

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise ConfigError("tool_call_pattern: a pattern reads calls, it cannot write them.")

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        name, body = (opening[1] or "").strip(), opening[2] or ""
        arguments: Any = {}
        if body.strip():
            try:
                arguments, _ = read_json(body, 0)
            except ValueError as error:
                return self._malformed(str(error), name), opening.end()
        return self._of_object({"name": name, "arguments": arguments}), opening.end()


_ATTRIBUTE = re.compile(r"""\bname\s*=\s*["']?([^"'\s>]+)""")
