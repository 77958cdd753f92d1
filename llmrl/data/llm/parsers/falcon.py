"""Falcon instruct text -> messages: ``<|role|>``, a newline, the content; only answers have an end marker."""

from __future__ import annotations

import re
from typing import Any

_HEADER = re.compile(r"<\|(system|user|assistant)\|>\n")
_END = "<|endoftext|>"


def parse_falcon(text: str) -> list[dict[str, Any]]:
    """Reads a Falcon conversation. The newline that ends a turn of the user or the system is not part of it.

    Returns  messages; the last carries ``"is_complete": False`` if what ends it is missing

    >>> parse_falcon("<|user|>\\nHi\\n<|assistant|>\\nHello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello', 'is_complete': False}]
    """
    pieces = _HEADER.split(text)
    messages: list[dict[str, Any]] = []
    for index in range(1, len(pieces), 2):
        role, body = pieces[index], pieces[index + 1]
        if role == "assistant":
            if not body and index == len(pieces) - 2:
                break  # a generation prompt
            content, end, _ = body.partition(_END)
        else:
            end = body.endswith("\n")
            content = body[:-1] if end else body
        messages.append({"role": role, "content": content})
        if not end:
            messages[-1]["is_complete"] = False
    return messages
