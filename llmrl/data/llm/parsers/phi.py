"""Phi-3 text -> messages: ``<|role|>``, a newline, the content, ``<|end|>``."""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.turns import read_turns

_HEADER = re.compile(r"<\|(system|user|assistant)\|>\n")


def parse_phi(text: str) -> list[dict[str, Any]]:
    """Reads a Phi-3 conversation.

    Returns  messages; the last carries ``"is_complete": False`` if its end marker is missing

    >>> parse_phi("<|user|>\\nHi<|end|>\\n<|assistant|>\\n")
    [{'role': 'user', 'content': 'Hi'}]
    """
    return read_turns(text, _HEADER, ("<|end|>", "<|endoftext|>"), {})
