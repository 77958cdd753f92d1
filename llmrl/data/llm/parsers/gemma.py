"""Gemma text -> messages: turns of ``user`` and ``model`` between ``<start_of_turn>`` and ``<end_of_turn>``."""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.turns import read_turns

_HEADER = re.compile(r"<start_of_turn>(\w+)\n")


def parse_gemma(text: str) -> list[dict[str, Any]]:
    """Reads a Gemma conversation.

    Returns  messages; the last carries ``"is_complete": False`` if its end marker is missing

    >>> parse_gemma("<bos><start_of_turn>model\\nHi<end_of_turn>\\n")
    [{'role': 'assistant', 'content': 'Hi'}]
    """
    return read_turns(text, _HEADER, ("<end_of_turn>", "<eos>"), {"model": "assistant"})
