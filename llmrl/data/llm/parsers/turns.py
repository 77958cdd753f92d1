"""Helpers of the parsers: text cut into turns, each opened by a header and closed by an end marker; tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llmrl.strict_json import JSONError, parse_json

Message = dict[str, Any]


def read_turns(text: str, header: re.Pattern[str], ends: Sequence[str], roles: dict[str, str]) -> list[Message]:
    """Reads a conversation whose turns begin with a header and end with one of several markers.

    Reads    header  matches what opens a turn; its first group is the role as the format names it
             ends    markers that close a turn; the first one found counts
             roles   the format's names of roles that are called otherwise here
    Returns  messages with the contents as they stand, without one for a trailing generation prompt

    >>> read_turns("[user]Hi;[bot]Hel", re.compile(r"\\[(\\w+)\\]"), (";",), {"bot": "assistant"})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    pieces = header.split(text)
    messages: list[Message] = []
    for index in range(1, len(pieces), 2):
        role, body = roles.get(pieces[index], pieces[index]), pieces[index + 1]
        if not body and role == "assistant" and index == len(pieces) - 2:
            break
        end = min((place for marker in ends if (place := body.find(marker)) >= 0), default=None)
        messages.append({"role": role, "content": body[:end]} | ({"is_complete": False} if end is None else {}))
    return messages


def read_call(text: str, arguments: str) -> Message | None:
    """A tool call from a JSON object with "name" and an entry for the arguments; None for any other text.

    >>> read_call('{"name": "add", "parameters": {"a": 1}}', "parameters")
    {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    try:
        call = parse_json(text)
    except JSONError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return make_call(call["name"], call.get(arguments, {}))


def between(text: str, opening: str, closing: str) -> list[str]:
    """The text between each opening and the closing marker after it, in time linear in the text.

    >>> between("[a] b] [c] [d", "[", "]")
    ['a', 'c']
    """
    found = []
    place = text.find(opening)
    while place >= 0 and (end := text.find(closing, place + len(opening))) >= 0:
        found.append(text[place + len(opening) : end])
        place = text.find(opening, end + len(closing))
    return found


def make_call(name: str, arguments: Any) -> Message:
    """A tool call in the chat format of the Transformers library."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
