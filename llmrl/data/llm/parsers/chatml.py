"""ChatML text -> messages, with the tool markup that Qwen's models write. A view for people, never for training.

The markers are the only structure that is read: contents come back character for character. What this cannot tell is
whether a marker in the text was written as a control token or as ordinary characters; token streams can.
"""

from __future__ import annotations

import json
import re
from typing import Any

_START, _END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TOOL_CALL = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_TOOL_RESPONSES = re.compile(r"\n?(?:<tool_response>\n.*?\n</tool_response>\n?)+", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def parse_chatml(text: str) -> list[dict[str, Any]]:
    """Reads a ChatML conversation.

    Reads    text  turns between ``<|im_start|>role\\n`` and ``<|im_end|>``; ``<|endoftext|>`` ends a turn as well
    Returns  messages; the last carries ``"is_complete": False`` if its end marker is missing. A trailing generation
             prompt (``<|im_start|>assistant\\n`` and nothing else) is no message. ``<tool_call>`` blocks of the
             assistant become ``"tool_calls"``, ``<tool_response>`` blocks of a user turn become ``"tool"`` messages

    A tool call whose body is not a JSON object stays in the content as it was written.

    >>> parse_chatml("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHel")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    messages: list[dict[str, Any]] = []
    turns = text.split(_START)[1:]
    for index, turn in enumerate(turns):
        role, _, body = turn.partition("\n")
        ends = [position for marker in (_END, _END_OF_TEXT) if (position := body.find(marker)) >= 0]
        is_last = index == len(turns) - 1
        if is_last and role == "assistant" and not body:
            break
        content = body[: min(ends)] if ends else body
        if role == "assistant":
            new = [_assistant_message(content)]
        elif role == "user" and _TOOL_RESPONSES.fullmatch(content):
            new = [{"role": "tool", "content": result} for result in _TOOL_RESPONSE.findall(content)]
        else:
            new = [{"role": role, "content": content}]
        if not ends:
            new[-1]["is_complete"] = False
        messages += new
    return messages


def _assistant_message(content: str) -> dict[str, Any]:
    """The assistant's text and, apart from it, the tool calls written at its end."""
    calls = []
    rest = content
    while match := _last_call(rest):
        try:
            call = json.loads(match.group(1))
        except ValueError:
            break
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            break
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}})
        rest = rest[: match.start()]
    message: dict[str, Any] = {"role": "assistant", "content": rest}
    if calls:
        message["tool_calls"] = calls[::-1]
    return message


def _last_call(text: str) -> re.Match[str] | None:
    """The tool call that ends the text, if one does."""
    start = text.rfind("<tool_call>")
    if start < 0:
        return None
    start -= text[start - 1 : start] == "\n"
    return _TOOL_CALL.fullmatch(text, start)
