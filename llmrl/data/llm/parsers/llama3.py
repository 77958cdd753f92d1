"""Llama 3 text -> messages: ``<|start_header_id|>role<|end_header_id|>``, a blank line, the content, ``<|eot_id|>``."""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.turns import read_call, read_turns

_HEADER = re.compile(r"<\|start_header_id\|>([^<\n]*)<\|end_header_id\|>\n\n")
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def parse_llama3(text: str) -> list[dict[str, Any]]:
    """Reads a Llama 3 conversation. An answer that is one JSON object with a name and parameters is a tool call.

    Returns  messages; the last carries ``"is_complete": False`` if its end marker is missing

    >>> parse_llama3("<|start_header_id|>ipython<|end_header_id|>\\n\\n42<|eot_id|>")
    [{'role': 'tool', 'content': '42'}]
    """
    messages = read_turns(text, _HEADER, _ENDS, {"ipython": "tool"})
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and content.startswith("{") and '"parameters"' in content:
            call = read_call(content, "parameters")
            if call is not None:
                message |= {"content": "", "tool_calls": [call]}
    return messages
