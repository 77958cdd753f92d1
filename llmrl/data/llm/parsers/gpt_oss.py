"""Harmony text, the format of gpt-oss -> messages: final channel, its analysis, calls on the commentary channel."""

from __future__ import annotations

import re
from typing import Any

from llmrl.data.llm.parsers.turns import Message, make_call
from llmrl.strict_json import JSONError, parse_json

_TURN = re.compile(
    r"<\|start\|>([\w.-]+)(?: to=assistant)?(?:<\|channel\|>(\w+)(?: to=functions\.([\w.-]+))?)?"
    r"(?: ?<\|constrain\|>\w+)?(?:<\|message\|>)?"
)
_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>")
_SAID = ("analysis", "final")
_INSTRUCTIONS = "# Instructions\n\n"


def thought_key(jinja: str) -> str:
    """The key under which a template of this format reads an answer's analysis: "thinking" in OpenAI's own."""
    return "thinking" if "reasoning_content" not in jinja and "thinking" in jinja else "reasoning_content"


def read_gpt_oss_answer(text: str, *, thought: str = "reasoning_content") -> Message:
    """An answer after ``<|start|>assistant``, without its last control token, as fields of its message.

    The final channel is the content, the analysis before it is separate. An answer with a call, one that uses only the
    commentary channel, and one that is not in this format stay as they were written.

    >>> read_gpt_oss_answer("<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4")
    {'content': '4', 'reasoning_content': '2+2'}
    """
    whole = f"<|start|>assistant{text}"
    headers = _TURN.findall(whole) if text.startswith("<|channel|>") else []
    messages = []
    if all(role == "assistant" and channel in _SAID and not called for role, channel, called in headers):
        messages = parse_gpt_oss(whole, thought=thought) if headers else []
    if len(messages) != 1:
        return {"content": text}
    return {key: value for key, value in messages[0].items() if key not in ("role", "is_complete")}


def parse_gpt_oss(text: str, *, thought: str = "reasoning_content") -> list[Message]:
    """Reads a harmony conversation. A tool call that is not JSON stays in the content as it was written.

    Returns  messages: the developer's instructions as the system message, the analysis that precedes an answer or a
             call under ``thought``; the system turn about model and date is left out. The last carries
             ``"is_complete": False`` if its end marker is missing, even if it has only an analysis. A tool's answer
             has a "name" only if it differs from that of the call before it

    >>> parse_gpt_oss("<|start|>assistant<|channel|>final<|message|>4<|return|>")
    [{'role': 'assistant', 'content': '4'}]
    """
    messages: list[Message] = []
    reasoning = last_called = ""
    pieces = _TURN.split(text)
    for index in range(1, len(pieces), 4):
        role, channel, called, body = pieces[index : index + 4]
        end = _END.search(body)
        content = body[: end.start()] if end else body
        if role == "system" or (role == "assistant" and channel is None and not body):
            continue  # about the model, or a generation prompt
        if channel == "analysis":  # a message of its own in the text; here a field of the answer or call after it
            reasoning = f"{reasoning}\n{content}" if reasoning else content
            continue
        message: Message = {"role": role, "content": content}
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
            message[thought] = reasoning
        if not end:
            message["is_complete"] = False
        messages.append(message)
        reasoning = ""
    if reasoning:
        messages.append({"role": "assistant", "content": "", thought: reasoning, "is_complete": False})
    return messages


def _read(arguments: str) -> Any:
    try:
        return parse_json(arguments)
    except JSONError:
        return None
