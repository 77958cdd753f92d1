# ruff: noqa: RUF001 (the format is written with full-width bars)
"""Calls as DeepSeek models write them: control tokens around the name and the arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, structured_call

__all__ = ["DeepSeekFormat"]

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(rf"\s*+([^\n<]*+){_SEP}")
_FENCED = re.compile(r"[ \t]*([^\s`{<]+)[ \t]*\n\s*(?:```(?:json)?)?")
_AFTER = re.compile(rf"\s*(?:```\s*)?(?:{_CALL_END}|(?={_CALL}|{_CALLS_END})|$)")
_NEXT = re.compile(f"{_CALL_END}|(?={_CALL}|{_CALLS_END})")


class DeepSeekFormat(CallFormat):
    """V3 and R1: the kind, ``<｜tool▁sep｜>``, the name, the arguments in a JSON fence. V3.1: name, separator, JSON.

    Either is read; ``fenced`` says which is written, and shown to a model that wrote neither.

    >>> form = DeepSeekFormat(fenced=False)
    >>> form.render("add", {"a": 1})
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    >>> form.parse(form.render("add", {"a": 1}))
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "deepseek"
    in_templates = True
    opening = re.compile(_CALL)

    def __init__(self, fenced: bool = True) -> None:
        self.fenced = fenced
        self.example = self._written("<tool>", "{...}")

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._written(name, json_text(dict(arguments)))

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        """With the arguments as text, which is how these templates take them."""
        content = text[: calls[0][0].span[0]].rstrip().removesuffix(_CALLS)
        entries = [structured_call(call.name, self._arguments(text[slice(*call.span)]), id) for call, id in calls]
        return {"content": content, "tool_calls": entries}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        head = _HEAD.match(text, opening.end())
        if head is None:
            return self._malformed(f"{_SEP} must follow the name"), self._skip(text, opening.end())
        fenced = _FENCED.match(text, head.end())
        name, place = (fenced[1], fenced.end()) if fenced else (head[1].rstrip(), head.end())
        if not name:
            return self._malformed("it names no tool"), self._skip(text, place)
        return self._of_arguments(name, text, place, _AFTER, _CALL_END)

    def _skip(self, text: str, place: int) -> int:
        """Past a call that cannot be read: after its end, or where the next one opens."""
        following = _NEXT.search(text, place)
        return following.end() if following else len(text)

    def _written(self, name: str, arguments: str) -> str:
        inner = f"function{_SEP}{name}\n```json\n{arguments}\n```" if self.fenced else f"{name}{_SEP}{arguments}"
        return f"{_CALLS}{_CALL}{inner}{_CALL_END}{_CALLS_END}"

    def _arguments(self, written: str) -> str:
        """Of a call as it was written, well or badly, what follows the name."""
        head = _HEAD.match(written, len(_CALL))
        if head is None:
            return written
        fenced = _FENCED.match(written, head.end())
        body = written[fenced.end() if fenced else head.end() :]
        return body.strip().removesuffix(_CALL_END).strip().removesuffix("```").strip()
