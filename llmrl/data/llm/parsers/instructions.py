"""Formats that write ``[INST] question [/INST] answer </s>``: Llama 2 and Mistral."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmrl.data.llm.parsers.turns import Message

_LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>\n(.*?)\n<</SYS>>\n\n", re.DOTALL)
_MISTRAL_SYSTEM = re.compile(r"(?:<s>)?\[SYSTEM_PROMPT\] ?(.*?)\[/SYSTEM_PROMPT\]", re.DOTALL)


def parse_llama(text: str) -> list[Message]:
    """Reads a Llama 2 conversation. White space around contents is the format's, not theirs.

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
