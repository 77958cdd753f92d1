"""Harmony text, the format of gpt-oss -> messages: the final channel is the content, the analysis its reasoning."""

from __future__ import annotations

import re
from typing import Any

_TURN = re.compile(r"<\|start\|>(\w+)(?:<\|channel\|>(\w+))?(?:<\|message\|>)?")
_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>")
_INSTRUCTIONS = "# Instructions\n\n"


def parse_gpt_oss(text: str) -> list[dict[str, Any]]:
    """Reads a harmony conversation.

    Returns  messages: the developer's instructions as the system message, the analysis that precedes an answer as its
             ``"reasoning_content"``; the system turn about model and date is none. The last carries ``"is_complete":
             False`` if its end marker is missing, also if its analysis is all there is

    >>> parse_gpt_oss("<|start|>assistant<|channel|>final<|message|>4<|return|>")
    [{'role': 'assistant', 'content': '4'}]
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    pieces = _TURN.split(text)
    for index in range(1, len(pieces), 3):
        role, channel, body = pieces[index : index + 3]
        end = _END.search(body)
        content = body[: end.start()] if end else body
        if role == "system" or (role == "assistant" and channel is None and not body):
            continue  # about the model, or a generation prompt
        if channel == "analysis":
            reasoning = content
            continue
        if role == "developer":
            role, content = "system", content.removeprefix(_INSTRUCTIONS)
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant" and reasoning:
            message["reasoning_content"] = reasoning
        if not end:
            message["is_complete"] = False
        messages.append(message)
        reasoning = ""
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning, "is_complete": False})
    return messages
