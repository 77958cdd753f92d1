# ruff: noqa: RUF001 (the format is written with full-width bars)
"""DeepSeek V3 text -> messages: ``<｜User｜>`` and ``<｜Assistant｜>`` turns, marked tool calls and tool outputs."""

from __future__ import annotations

import re

from llmrl.data.llm.parsers.turns import Message, between, make_call
from llmrl.strict_json import JSONError, parse_json

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TURN = re.compile("(<｜User｜>|<｜Assistant｜>|<｜tool▁outputs▁begin｜>)")
_OUTPUT, _OUTPUT_END, _OUTPUTS_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_HEAD = re.compile(r"\n?<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]*)\n```json\n")
_CALL_END = "\n```<｜tool▁call▁end｜>"


def parse_deepseek(text: str) -> list[Message]:
    """Reads a DeepSeek V3 conversation. A tool call that is not JSON stays in the content as it was written.

    >>> parse_deepseek("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    system, *pieces = _TURN.split(text.removeprefix(_BEGIN))
    messages: list[Message] = []
    if system and pieces:
        messages.append({"role": "system", "content": system})
    for index in range(0, len(pieces), 2):
        mark, body = pieces[index], pieces[index + 1]
        if mark == "<｜User｜>":
            messages.append({"role": "user", "content": body.removesuffix(_END)})
            continue
        if mark != "<｜Assistant｜>":
            outputs, closed, body = body.partition(_OUTPUTS_END)
            messages += [{"role": "tool", "content": output} for output in between(outputs, _OUTPUT, _OUTPUT_END)]
            if not closed and messages:
                messages[-1]["is_complete"] = False
        if body:
            messages.append(_answer(body))
    return messages


def _answer(body: str) -> Message:
    content, end, _ = body.partition(_END)
    message: Message = {"role": "assistant", "content": content}
    said, opened, calls = content.partition(_CALLS)
    if opened and calls.endswith(_CALLS_END) and (found := _calls(calls.removesuffix(_CALLS_END))):
        message |= {"content": said, "tool_calls": found}
    if not end:
        message["is_complete"] = False
    return message


def _calls(text: str) -> list[Message] | None:
    """The calls that a text consists of; None if it contains anything else."""
    found = []
    place = 0
    while place < len(text):
        head = _HEAD.match(text, place)
        end = text.find(_CALL_END, head.end()) if head else -1
        if end < 0:
            return None
        try:
            found.append(make_call(head[1], parse_json(text[head.end() : end])))
        except JSONError:
            return None
        place = end + len(_CALL_END)
    return found
