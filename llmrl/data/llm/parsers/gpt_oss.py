"""Harmony text, the format of gpt-oss -> messages: final channel, its analysis, and calls on the commentary channel."""

from __future__ import annotations

import json
import re
from typing import Any

from llmrl.data.llm.parsers.turns import make_call

_TURN = re.compile(
    r"<\|start\|>([\w.-]+)(?: to=assistant)?(?:<\|channel\|>(\w+)(?: to=functions\.([\w.-]+))?)?"
    r"(?: ?<\|constrain\|>\w+)?(?:<\|message\|>)?"
)
_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>")
_INSTRUCTIONS = "# Instructions\n\n"


def parse_gpt_oss(text: str) -> list[dict[str, Any]]:
    """Reads a harmony conversation. A tool call that is not JSON stays in the content as it was written.

    Returns  messages: the developer's instructions as the system message, the analysis that precedes an answer or a
             call as its ``"reasoning_content"``; the system turn about model and date is none. The last carries
             ``"is_complete": False`` if its end marker is missing, also if its analysis is all there is. A tool's
             answer has a name where it is not that of the call before it

    >>> parse_gpt_oss("<|start|>assistant<|channel|>final<|message|>4<|return|>")
    [{'role': 'assistant', 'content': '4'}]
    """
    messages: list[dict[str, Any]] = []
    reasoning = last_called = ""
    pieces = _TURN.split(text)
    for index in range(1, len(pieces), 4):
        role, channel, called, body = pieces[index : index + 4]
        end = _END.search(body)
        content = body[: end.start()] if end else body
        if role == "system" or (role == "assistant" and channel is None and not body):
            continue  # about the model, or a generation prompt
        if channel == "analysis":
            reasoning = content
            continue
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "developer":
            message = {"role": "system", "content": content.removeprefix(_INSTRUCTIONS)}
        elif role.startswith("functions."):
            message = {"role": "tool", "content": content}
            if (name := role.removeprefix("functions.")) != last_called:
                message["name"] = name
        elif called and (arguments := _read(content)) is not None:
            message |= {"content": "", "tool_calls": [make_call(called, arguments)]}
            last_called = called
        if role == "assistant" and reasoning:
            message["reasoning_content"] = reasoning
        if not end:
            message["is_complete"] = False
        messages.append(message)
        reasoning = ""
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning, "is_complete": False})
    return messages


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None
