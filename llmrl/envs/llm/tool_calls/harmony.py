"""Calls as gpt-oss models write them, in the harmony format: a message to a tool, with its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.data.llm.parsers.turns import between
from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, structured_call

__all__ = ["HarmonyFormat"]

_TOOLS = "functions."
_END = re.compile(r"<\|(?:call|end|return)\|>|(?=<\|start\|>)")
_AFTER = re.compile(rf"\s*(?:{_END.pattern}|$)")


class HarmonyFormat(CallFormat):
    """A header with ``to=functions.name``, before or after the channel, ``<|message|>``, JSON, ``<|call|>``.

    What other channels hold, the analysis above all, is no call. The model ends its turn with ``<|call|>``, so that an
    answer has one. ``thought`` is where the template reads what came before it.

    >>> HarmonyFormat().parse('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "harmony"
    in_templates = True
    opening = re.compile(
        r"to=(?!assistant|user)([\w.-]{1,80})[^<\n]{0,40}(?:<\|(?:channel|constrain)\|>[^<\n]{0,40}){0,3}<\|message\|>"
    )
    example = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"

    def __init__(self, thought: str = "reasoning_content") -> None:
        self.thought = thought

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        header = f"<|channel|>commentary to={_TOOLS}{name} <|constrain|>json"
        return f"{header}<|message|>{json_text(dict(arguments))}<|call|>"

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        """What came before the call, on whatever channel, is its reasoning. These templates take one call a turn."""
        [*_, (call, call_id)] = calls
        start, end = call.span
        arguments = call.arguments
        if arguments is None:
            arguments = _END.split(text[self.opening.search(text, start).end() : end])[0].strip()
        said = "\n".join(between(text[:start], "<|message|>", "<|end|>"))
        thought = {self.thought: said} if said else {}
        return {"content": "", "tool_calls": [structured_call(call.name, arguments, call_id)], **thought}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        name = opening[1].removeprefix(_TOOLS)
        ending = _END.search(text, opening.end())
        if not text[opening.end() : ending.start() if ending else len(text)].strip():
            return [ParsedCall(name, {})], ending.end() if ending else len(text)
        return self._of_arguments(name, text, opening.end(), _AFTER, "<|call|>")

    def _skip(self, text: str, place: int) -> int:
        ending = _END.search(text, place)
        return ending.end() if ending else len(text)
