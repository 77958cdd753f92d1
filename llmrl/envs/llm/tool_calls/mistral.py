"""Calls as Mistral models write them: ``[TOOL_CALLS]``, then a JSON list of calls, or the name and arguments of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, structured_call
from llmrl.strict_json import read_json

__all__ = ["MistralFormat"]

_MARK = "[TOOL_CALLS]"
_LIST = re.compile(r"\s*(?=[\[{])")
_NAMED = re.compile(r"\s*([\w.-]{1,80})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]{1,40})\s*)?(?:\[ARGS\])?")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class MistralFormat(CallFormat):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``; of newer models ``[TOOL_CALLS]name[ARGS]{...}`` per call.

    Either is read; ``named`` says which is written, and shown to a model that wrote neither. A call's id has nine
    letters or digits, as these templates demand.

    >>> MistralFormat().parse('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS] [{"name": "sub", "arguments": {}}]')[1]
    ParsedCall(name='sub', arguments={}, error=None)
    >>> MistralFormat().call_id(conversation=36, turn=1, number=0)
    '001000100'
    """

    name = "mistral"
    in_templates = True
    opening = re.compile(re.escape(_MARK))

    def __init__(self, named: bool = False) -> None:
        self.named = named
        self.example = self._written("<tool>", "{...}")

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._written(json_text(name)[1:-1], json_text(dict(arguments)))

    def call_id(self, conversation: int, turn: int, number: int) -> str:
        return _based(conversation, 4) + _based(turn, 3) + _based(number, 2)

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        content = text[: calls[0][0].span[0]].strip()
        entries = []
        for call, call_id in calls:
            written = text[slice(*call.span)].removeprefix(_MARK).strip()
            arguments = written if call.arguments is None else call.arguments
            entries.append(structured_call(call.name, arguments, call_id))
        return {"content": content, "tool_calls": entries}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        several = _LIST.match(text, opening.end())
        named = None if several else _NAMED.match(text, opening.end())
        name = named[1] if named else ""
        if not several and not named:
            return self._malformed("it names no tool"), self._skip(text, opening.end())
        try:
            value, end = read_json(text, (several or named).end())
        except ValueError as error:
            return self._malformed(str(error), name), self._skip(text, opening.end())
        if named:
            return [_with_id(call, named[2]) for call in self._of_object({"name": name, "arguments": value})], end
        calls = []
        for entry in value if isinstance(value, list) else [value]:
            given = entry.get("id") if isinstance(entry, dict) else None
            calls += [_with_id(call, given) for call in self._of_object(entry)]
        return calls, end

    def _skip(self, text: str, place: int) -> int:
        following = text.find(_MARK, place)
        return len(text) if following < 0 else following

    def _written(self, name: str, arguments: str) -> str:
        if self.named:
            return f"{_MARK}{name}[ARGS]{arguments}"
        return f'{_MARK} [{{"name": "{name}", "arguments": {arguments}}}]'


def _with_id(call: ParsedCall, given: Any) -> ParsedCall:
    """The call under the id that the model gave it, if it can be one."""
    return replace(call, id=given) if isinstance(given, str) and _ID.fullmatch(given) else call


def _based(number: int, width: int) -> str:
    """The last digits of a number to the base 36."""
    digits = ""
    for _ in range(width):
        number, last = divmod(number, 36)
        digits = _DIGITS[last] + digits
    return digits
