"""What a call format is: how a model writes a tool call, and the one scanner that finds calls in an answer.

A format says what opens a call and reads one; the scanner walks through an answer and leaves out what was only thought.
Whether a tool of that name exists, and whether its arguments fit, is decided by `llmrl.tools`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["CallFormat", "ParsedCall", "read_json"]

Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its parameters
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(r"</?think>")
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as the model wrote it; ``error`` says what is wrong with it, in words for the model."""

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None


class CallFormat(ABC):
    """How a model writes calls.

    name     what ``format=`` calls it
    opening  a pattern that matches where a call begins, and nothing else
    example  a call, for messages to a model that wrote something else
    in_templates  whether chat templates teach it, from the schemas that they declare
    """

    name: ClassVar[str]
    in_templates: ClassVar[bool] = False
    opening: re.Pattern[str]
    example: str

    def parse(self, text: str, schemas: Schemas | None = None, *, thinking: bool = False) -> list[ParsedCall]:
        """The calls of one answer, in order. Never raises, whatever the text.

        Reads   schemas   of the tools by name, for formats that write values without their types
                thinking  the prompt ended inside a ``<think>`` block, which the answer goes on with
        Returns the calls outside ``<think>`` ... ``</think>``; a block that does not end holds the rest of the answer
        """
        calls: list[ParsedCall] = []
        place = 0
        thought, opening = _THOUGHT.search(text), self.opening.search(text)
        while thought or opening:
            if opening is None or (thought and thought.start() < opening.start()):
                if thought[0] == _THINK_OPEN:
                    end = text.find(_THINK_CLOSE, thought.end())
                    if end < 0:
                        break
                    place = end + len(_THINK_CLOSE)
                else:  # it was opened in the prompt: all of the answer up to here was a thought
                    calls.clear()
                    thinking, place = False, thought.end()
            else:
                call, end = self._read(text, opening, schemas or {})
                place = max(end, opening.start() + 1)
                if call is not None:
                    calls.append(call)
            if thought and thought.start() < place:
                thought = _THOUGHT.search(text, place)
            if opening and opening.start() < place:
                opening = self.opening.search(text, place)
        return [] if thinking else calls

    @abstractmethod
    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call: what `parse` reads back."""

    @abstractmethod
    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[ParsedCall | None, int]:
        """The call that begins with ``opening``, None if it is none after all, and where to go on."""

    def _malformed(self, reason: str, name: str = "") -> ParsedCall:
        return ParsedCall(name, None, f"the call could not be read: {reason}. Write a call like this: {self.example}")


def read_json(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at ``place``, after white space, and where it ends.

    Raises  ValueError with a short reason

    >>> read_json('call: {"a": [1, 2]} and more', 6)
    ({'a': [1, 2]}, 19)
    """
    start = _SPACE.match(text, place).end()
    if start == len(text):
        raise ValueError("the arguments are missing")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        shown = text[error.pos : error.pos + _MAX_SHOWN].partition("\n")[0]
        raise ValueError(f"invalid JSON at {shown!r} ({error.msg})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def json_text(value: Any) -> str:
    """JSON on one line, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"\s*")
