"""ChatML text -> messages, with the tool markup that Qwen's models write. A view for people, never for training.

The markers are the only structure that is read: contents come back character for character. What this cannot tell is
whether a marker in the text was written as a control token or as ordinary characters; token streams can.
"""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.turns import read_call

_START, _END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TOOL_CALL = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_RESPONSE = "<tool_response>\n"
_RESPONSE_END = re.compile(r"\n</tool_response>(?=\n?\Z|\n?<tool_response>\n)\n?")


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
        elif role == "user" and (results := _tool_responses(content)):
            new = [{"role": "tool", "content": result} for result in results]
        else:
            new = [{"role": role, "content": content}]
        if not ends:
            new[-1]["is_complete"] = False
        messages += new
    return messages


def _assistant_message(content: str) -> dict[str, Any]:
    """The assistant's text and, apart from it, the tool calls written at its end."""
    calls = []
    end = len(content)
    while (match := _last_call(content, end)) and (call := read_call(match.group(1), "arguments")):
        calls.append(call)
        end = match.start()
    message: dict[str, Any] = {"role": "assistant", "content": content[:end]}
    if calls:
        message["tool_calls"] = calls[::-1]
    return message


def _last_call(text: str, end: int) -> re.Match[str] | None:
    """The tool call that ends the text up to ``end``, if one does."""
    start = text.rfind("<tool_call>", 0, end)
    if start < 0:
        return None
    start -= text[max(0, start - 1) : start] == "\n"
    return _TOOL_CALL.fullmatch(text, start, end)


def _tool_responses(text: str) -> list[str]:
    """The results that a text consists of; none if there is anything else in it."""
    results = []
    place = int(text.startswith("\n"))
    while text.startswith(_RESPONSE, place) and (end := _RESPONSE_END.search(text, place + len(_RESPONSE))):
        results.append(text[place + len(_RESPONSE) : end.start()])
        place = end.end()
    return results if place == len(text) else []
