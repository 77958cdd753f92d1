"""Mistral's instruct text -> messages: ``<s>[INST] question[/INST] answer</s>``, with one space before each content."""

from __future__ import annotations

import re
from typing import Any

_SYSTEM = re.compile(r"(?:<s>)?\[SYSTEM_PROMPT\] ?(.*?)\[/SYSTEM_PROMPT\]", re.DOTALL)


def parse_mistral(text: str) -> list[dict[str, Any]]:
    """Reads a Mistral conversation; contents come back character for character.

    Returns  messages; the last carries ``"is_complete": False`` if its ``[/INST]`` or ``</s>`` is missing

    >>> [message["content"] for message in parse_mistral("<s>[INST] Hi[/INST] Hello</s>[INST] And?[/INST]")]
    ['Hi', 'Hello', 'And?']
    """
    system = _SYSTEM.match(text)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system[1]}] if system else []
    for turn in text[system.end() if system else 0 :].split("[INST]")[1:]:
        question, closed, rest = turn.partition("[/INST]")
        messages.append({"role": "user", "content": question.removeprefix(" ")})
        if not closed:
            messages[-1]["is_complete"] = False
            continue
        answer, ended, _ = rest.partition("</s>")
        if ended or answer:
            messages.append({"role": "assistant", "content": answer.removeprefix(" ")})
            if not ended:
                messages[-1]["is_complete"] = False
    return messages
