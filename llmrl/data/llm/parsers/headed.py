"""Formats whose turns begin with a header or end with a marker: Gemma, Llama 3, Phi-3, Falcon and DialoGPT."""

from __future__ import annotations

import re

from llmrl.data.llm.parsers.turns import Message, read_call, read_turns

_GEMMA_HEADER = re.compile(r"<start_of_turn>(\w+)\n")
_LLAMA3_HEADER = re.compile(r"<\|start_header_id\|>([^<\n]*)<\|end_header_id\|>\n\n")
_ROLE_HEADER = re.compile(r"<\|(system|user|assistant)\|>\n")
_END_OF_TEXT = "<|endoftext|>"


def parse_gemma(text: str) -> list[Message]:
    """Reads turns of ``user`` and ``model`` between ``<start_of_turn>`` and ``<end_of_turn>``.

    >>> parse_gemma("<bos><start_of_turn>model\\nHi<end_of_turn>\\n")
    [{'role': 'assistant', 'content': 'Hi'}]
    """
    return read_turns(text, _GEMMA_HEADER, ("<end_of_turn>", "<eos>"), {"model": "assistant"})


def parse_llama3(text: str) -> list[Message]:
    """Reads Llama 3 text. An answer that is one JSON object with a name and parameters is a tool call.

    >>> parse_llama3("<|start_header_id|>ipython<|end_header_id|>\\n\\n42<|eot_id|>")
    [{'role': 'tool', 'content': '42'}]
    """
    messages = read_turns(text, _LLAMA3_HEADER, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), {"ipython": "tool"})
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and content.startswith("{") and '"parameters"' in content:
            call = read_call(content, "parameters")
            if call is not None:
                message |= {"content": "", "tool_calls": [call]}
    return messages


def parse_phi(text: str) -> list[Message]:
    """Reads Phi-3 text: ``<|role|>``, a newline, the content, ``<|end|>``.

    >>> parse_phi("<|user|>\\nHi<|end|>\\n<|assistant|>\\n")
    [{'role': 'user', 'content': 'Hi'}]
    """
    return read_turns(text, _ROLE_HEADER, ("<|end|>", _END_OF_TEXT), {})


def parse_falcon(text: str) -> list[Message]:
    """Reads Falcon text: ``<|role|>``, a newline, the content; answers end with a marker, other turns with a newline.

    >>> parse_falcon("<|user|>\\nHi\\n<|assistant|>\\nHello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello', 'is_complete': False}]
    """
    pieces = _ROLE_HEADER.split(text)
    messages: list[Message] = []
    for index in range(1, len(pieces), 2):
        role, body = pieces[index], pieces[index + 1]
        if role == "assistant":
            if not body and index == len(pieces) - 2:
                break  # a generation prompt
            content, end, _ = body.partition(_END_OF_TEXT)
        else:
            end = body.endswith("\n")
            content = body[:-1] if end else body
        messages.append({"role": role, "content": content} | ({} if end else {"is_complete": False}))
    return messages


def parse_dialogpt(text: str) -> list[Message]:
    """Reads turns that end with ``<|endoftext|>``. They name no roles: the first is the user's, then they alternate.

    >>> parse_dialogpt("Hi<|endoftext|>Hel")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    turns = text.split(_END_OF_TEXT)
    messages: list[Message] = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(turns)
    ]
    if not turns[-1]:
        return messages[:-1]
    messages[-1]["is_complete"] = False
    return messages
