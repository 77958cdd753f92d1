"""`CallFormat`: the scanner that finds tool calls in an answer, and the parts that formats share.

A format defines how a call begins and parses one; the scanner walks through an answer and skips thinking. Limits on the
length of names and the number of calls keep parsing linear. `llmrl.tools` checks that a tool exists and its arguments
fit.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from llmrl.strict_json import read_json

Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its parameters
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(r"</?think>")
_MAX_CALLS = 64  # parsed per answer
_MAX_NAME = 200  # characters of a tool's name, because the next prompt repeats it
_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_KINDS[type(None)] = "null"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as the model wrote it; ``error`` explains to the model why it could not be read.

    id    the model's own id, in formats that have one
    span  (start, end) of the call in the answer
    """

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None
    id: str | None = field(default=None, repr=False)
    span: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)


class CallFormat(ABC):
    """The notation of tool calls in an answer.

    A subclass defines `_read`, and `render` if filling in ``example`` is not enough.

    name          for ``format=``
    opening       a pattern that matches the beginning of a call, and nothing else
    resume        after a malformed call, parsing continues at the end of this pattern's next match
    example       a call with the placeholders ``<tool>`` and ``{...}``, shown to a model whose call is malformed
    in_templates  True if chat templates explain the format to the model when they declare tools
    """

    name: ClassVar[str]
    in_templates: ClassVar[bool] = False
    opening: re.Pattern[str]
    resume: re.Pattern[str] = re.compile(r"\Z")
    example: str

    def parse(self, text: str, schemas: Schemas | None = None, *, thinking: bool = False) -> list[ParsedCall]:
        """The calls of one answer, in order. Never raises for any text.

        Reads   schemas   tool name -> JSON schema, for formats that write values without their types
                thinking  True if the prompt ended inside a ``<think>`` block, which the answer continues
        Returns the calls outside ``<think>`` ... ``</think>``; an unclosed block extends to the end of the answer.
                At most 64 calls are parsed; if there are more, one extra malformed call reports it
        """
        calls: list[ParsedCall] = []
        place = 0
        thought, opening = _THOUGHT.search(text), self.opening.search(text)
        while (thought or opening) and len(calls) <= _MAX_CALLS:
            # Handles whichever comes first, a thought or a call: calls inside a thought do not count.
            if opening is None or (thought and thought.start() < opening.start()):
                if thought[0] == _THINK_OPEN:
                    end = text.find(_THINK_CLOSE, thought.end())
                    if end < 0:
                        break
                    place = end + len(_THINK_CLOSE)
                else:  # the prompt opened it: the whole answer up to here was a thought
                    calls.clear()
                    thinking, place = False, thought.end()
            else:
                found, end = self._read(text, opening, schemas or {})
                # Advances by at least one character: a format that consumes nothing must not loop forever.
                place = max(end, opening.start() + 1)
                calls += [replace(self._named(call), span=(opening.start(), end)) for call in found]
            if thought and thought.start() < place:
                thought = _THOUGHT.search(text, place)
            if opening and opening.start() < place:
                opening = self.opening.search(text, place)
        if len(calls) > _MAX_CALLS:
            many = self._malformed(f"an answer may have {_MAX_CALLS} calls, and what follows them is not read")
            calls[_MAX_CALLS:] = [replace(call, span=calls[_MAX_CALLS].span) for call in many]
        return [] if thinking else calls

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call, ``example`` with this name and these arguments; `parse` reads it back."""
        before, _, rest = self.example.partition("<tool>")
        between, _, after = rest.partition("{...}")
        return f"{before}{json_text(name)[1:-1]}{between}{json_text(dict(arguments))}{after}"

    def call_id(self, conversation: int, turn: int, number: int) -> str:
        """The id of a call without an id from the model: deterministic, and unique per call."""
        return f"call_{conversation}_{turn}_{number}"

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        """The answer split into "content" and "tool_calls", for templates that keep calls apart from the content.

        Reads   the answer, and all of its calls, each with its id
        Returns the fields of the message except its role; None if calls are part of the content
        """
        return None

    @abstractmethod
    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        """The calls that begin at ``opening`` (none if it is not a call after all), and where parsing continues."""

    def _malformed(self, reason: str, name: str = "") -> list[ParsedCall]:
        return [ParsedCall(name, None, f"the call could not be read: {reason}. Write a call like this: {self.example}")]

    def _of_json(
        self, text: str, place: int, after: re.Pattern[str], close: str, name: str | None = None
    ) -> tuple[list[ParsedCall], int]:
        """The call in the JSON at ``place``, and where parsing continues.

        With ``name`` the JSON holds the arguments, else the whole call. ``after`` must match directly after the JSON;
        ``close`` describes it in an error for the model.
        """
        try:
            value, end = read_json(text, place)
        except ValueError as error:
            return self._malformed(str(error), name or ""), self._skip(text, place)
        closed = after.match(text, end)
        if closed is None:
            reason = f"{shown(text, end)} stands between the JSON object and {close}"
            return self._malformed(reason, name or ""), self._skip(text, end)
        return self._of_object(value if name is None else {"name": name, "arguments": value}), closed.end()

    def _named(self, call: ParsedCall) -> ParsedCall:
        """The call itself, or a malformed one if its name is too long."""
        if len(call.name) <= _MAX_NAME:
            return call
        return self._malformed(f"the tool's name has {len(call.name)} characters, at most {_MAX_NAME} are read")[0]

    def _skip(self, text: str, place: int) -> int:
        """The place after a malformed call, given a place inside it."""
        found = self.resume.search(text, place)
        return found.end() if found else len(text)

    def _of_object(self, value: Any) -> list[ParsedCall]:
        name, arguments, reason = call_from_object(value)
        return self._malformed(reason, name) if reason else [ParsedCall(name, arguments)]


def call_from_object(value: Any) -> tuple[str, dict[str, Any] | None, str]:
    """Name, arguments and error ("" if valid) of a JSON value that should be a call.

    The key of the arguments is "arguments" or "parameters"; they are a JSON object, the text of one, or left out.

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


def structured_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """One entry of a message's "tool_calls"."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shown(text: str, place: int) -> str:
    """The answer from ``place`` on, shortened for an error message."""
    return repr(text[place : place + 200].strip()[:40])


def json_text(value: Any) -> str:
    """JSON on one line, with non-ASCII characters unescaped."""
    return json.dumps(value, ensure_ascii=False)
