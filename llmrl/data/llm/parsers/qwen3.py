"""Qwen 3 text -> messages: ChatML whose answers begin with a ``<think>`` block."""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.chatml import parse_chatml

_THINKING = re.compile(r"<think>\n(.*?)\n</think>\n\n", re.DOTALL)
_BEFORE_CALLS = re.compile(r"<think>\n(.*?)\n</think>\n", re.DOTALL)  # the line end before a call belongs to the call


def parse_qwen3(text: str) -> list[dict[str, Any]]:
    """Reads a Qwen 3 conversation: as ChatML, with the thinking of an answer apart in ``"reasoning_content"``.

    An empty block is no thinking. A block that does not end, or does not begin the answer, stays in the content.

    >>> parse_qwen3("<|im_start|>assistant\\n<think>\\n2+2\\n</think>\\n\\n4<|im_end|>")
    [{'role': 'assistant', 'content': '4', 'reasoning_content': '2+2'}]
    """
    messages = parse_chatml(text)
    for message in messages:
        if message["role"] != "assistant":
            continue
        thinking = _THINKING.match(message["content"])
        if not thinking and "tool_calls" in message:
            thinking = _BEFORE_CALLS.fullmatch(message["content"])
        if thinking:
            message["content"] = message["content"][thinking.end() :]
            if thinking[1]:
                message["reasoning_content"] = thinking[1]
    return messages
