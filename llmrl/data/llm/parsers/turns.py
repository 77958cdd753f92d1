"""Formats of turns between markers (Gemma, Llama, Mistral, Phi-3, Falcon, DialoGPT), and helpers of all parsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from llmrl.strict_json import JSONError, parse_json

Message = dict[str, Any]

_GEMMA_HEADER = re.compile(r"<start_of_turn>(\w+)\n")
_LLAMA3_HEADER = re.compile(r"<\|start_header_id\|>([^<\n]*)<\|end_header_id\|>\n\n")
_ROLE_HEADER = re.compile(r"<\|(system|user|assistant)\|>\n")
_END_OF_TEXT = "<|endoftext|>"
_LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>\n(.*?)\n<</SYS>>\n\n", re.DOTALL)
_MISTRAL_SYSTEM = re.compile(r"(?:<s>)?\[SYSTEM_PROMPT\] ?(.*?)\[/SYSTEM_PROMPT\]", re.DOTALL)


def read_turns(text: str, header: re.Pattern[str], ends: Sequence[str], roles: dict[str, str]) -> list[Message]:
    """Reads a conversation whose turns begin with a header and end with one of several markers.

    Reads    header  matches the opening of a turn; its first group is the format's name of the role
             ends    markers that close a turn; the first one found counts
             roles   the format's role names -> ours, where they differ
    Returns  messages with unchanged contents, without one for a trailing generation prompt

    >>> read_turns("[user]Hi;[bot]Hel", re.compile(r"\\[(\\w+)\\]"), (";",), {"bot": "assistant"})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    pieces = header.split(text)
    messages: list[Message] = []
    for index in range(1, len(pieces), 2):
        role, body = roles.get(pieces[index], pieces[index]), pieces[index + 1]
        if not body and role == "assistant" and index == len(pieces) - 2:
            break
        end = min((place for marker in ends if (place := body.find(marker)) >= 0), default=None)
        messages.append({"role": role, "content": body[:end]} | ({"is_complete": False} if end is None else {}))
    return messages


def read_call(text: str, arguments: str) -> Message | None:
    """A tool call from a JSON object with "name" and an entry for the arguments; None for any other text.

    >>> read_call('{"name": "add", "parameters": {"a": 1}}', "parameters")
    {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    try:
        call = parse_json(text)
    except JSONError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return make_call(call["name"], call.get(arguments, {}))


def between(text: str, opening: str, closing: str) -> list[str]:
    """The text between each opening and the closing marker after it, in time linear in the text.

    >>> between("[a] b] [c] [d", "[", "]")
    ['a', 'c']
    """
    found = []
    place = text.find(opening)
    while place >= 0 and (end := text.find(closing, place + len(opening))) >= 0:
        found.append(text[place + len(opening) : end])
        place = text.find(opening, end + len(closing))
    return found


def make_call(name: str, arguments: Any) -> Message:
    """A tool call in the chat format of the Transformers library."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


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


def parse_llama(text: str) -> list[Message]:
    """Reads a Llama 2 conversation. White space around contents belongs to the format and is stripped.

    >>> [message["role"] for message in parse_llama("<s>[INST] <<SYS>>\\nS\\n<</SYS>>\\n\\nHi [/INST] Hello </s>")]
    ['system', 'user', 'assistant']
    """
    turns = [turn.rstrip().removesuffix("<s>") for turn in text.split("[INST]")[1:]]  # "<s>" opens the next turn
    system = _LLAMA_SYSTEM.match(turns[0]) if turns else None
    if system:
        turns[0] = turns[0][system.end() :]
    return _read(system, turns, str.strip)


def parse_mistral(text: str) -> list[Message]:
    """Reads a Mistral conversation; contents come back character for character, without the space before each.

    >>> [message["content"] for message in parse_mistral("<s>[INST] Hi[/INST] Hello</s>[INST] And?[/INST]")]
    ['Hi', 'Hello', 'And?']
    """
    system = _MISTRAL_SYSTEM.match(text)
    turns = text[system.end() if system else 0 :].split("[INST]")[1:]
    return _read(system, turns, lambda content: content.removeprefix(" "))


def _read(system: re.Match[str] | None, turns: list[str], clean: Callable[[str], str]) -> list[Message]:
    """Messages of turns; the last has ``"is_complete": False`` if its ``[/INST]`` or ``</s>`` is missing."""
    messages: list[Message] = [{"role": "system", "content": system[1]}] if system else []
    for turn in turns:
        question, closed, rest = turn.partition("[/INST]")
        messages.append({"role": "user", "content": clean(question)})
        answer, ended, _ = rest.partition("</s>")
        if closed and (ended or clean(answer)):
            messages.append({"role": "assistant", "content": clean(answer)})
        elif closed:
            continue
        if not ended:
            messages[-1]["is_complete"] = False
    return messages
