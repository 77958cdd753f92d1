# ruff: noqa: RUF001 (the format is written with full-width bars)
"""DeepSeek V3 text -> messages: ``<｜User｜>`` and ``<｜Assistant｜>`` turns, marked tool calls and tool outputs."""

from __future__ import annotations

import json
import re
from typing import Any

from llmrl.data.llm.parsers.turns import make_call

DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜end▁of▁sentence｜>",
)
_BEGIN, _END = DEEPSEEK_TOKENS[0], DEEPSEEK_TOKENS[-1]
_TURN = re.compile("(<｜User｜>|<｜Assistant｜>|<｜tool▁outputs▁begin｜>)")
_OUTPUT = re.compile("<｜tool▁output▁begin｜>(.*?)<｜tool▁output▁end｜>", re.DOTALL)
_OUTPUTS_END = "<｜tool▁outputs▁end｜>"
_CALLS = re.compile("<｜tool▁calls▁begin｜>(.*)<｜tool▁calls▁end｜>", re.DOTALL)
_CALL = re.compile(
    r"\n?<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]*)\n```json\n(.*?)\n```<｜tool▁call▁end｜>", re.DOTALL
)


def parse_deepseek(text: str) -> list[dict[str, Any]]:
    """Reads a DeepSeek V3 conversation. A tool call that is not JSON stays in the content as it was written.

    Returns  messages; the last carries ``"is_complete": False`` if an answer's end marker is missing. A question has
             none: it is complete

    >>> parse_deepseek("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    system, *pieces = _TURN.split(text.removeprefix(_BEGIN))
    messages: list[dict[str, Any]] = []
    if system and pieces:
        messages.append({"role": "system", "content": system})
    for index in range(0, len(pieces), 2):
        mark, body = pieces[index], pieces[index + 1]
        if mark == "<｜User｜>":
            messages.append({"role": "user", "content": body.removesuffix(_END)})
            continue
        if mark != "<｜Assistant｜>":
            outputs, closed, body = body.partition(_OUTPUTS_END)
            messages += [{"role": "tool", "content": output} for output in _OUTPUT.findall(outputs)]
            if not closed and messages:
                messages[-1]["is_complete"] = False
        if body:
            messages.append(_answer(body))
    return messages


def _answer(body: str) -> dict[str, Any]:
    content, end, _ = body.partition(_END)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = _CALLS.search(content)
    if calls and calls.end() == len(content) and not _CALL.sub("", calls[1]):
        try:
            found = [make_call(name, json.loads(arguments)) for name, arguments in _CALL.findall(calls[1])]
        except ValueError:
            found = []
        if found:
            message |= {"content": content[: calls.start()], "tool_calls": found}
    if not end:
        message["is_complete"] = False
    return message
