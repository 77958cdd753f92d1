"""DialoGPT text -> messages: turns of two speakers, each ended by ``<|endoftext|>``."""

from __future__ import annotations

from typing import Any

_END = "<|endoftext|>"


def parse_dialogpt(text: str) -> list[dict[str, Any]]:
    """Reads a DialoGPT conversation. The format names no roles: the first turn is the user's, then they alternate.

    Returns  messages; the last carries ``"is_complete": False`` if its end marker is missing

    >>> parse_dialogpt("Hi<|endoftext|>Hel")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    *ended, rest = text.split(_END)
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(ended)
    ]
    if rest:
        messages.append({"role": ("user", "assistant")[len(ended) % 2], "content": rest, "is_complete": False})
    return messages
