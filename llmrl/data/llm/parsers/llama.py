"""Llama 2 chat text -> messages: ``<s>[INST] <<SYS>>system<</SYS>> question [/INST] answer </s>``."""

from __future__ import annotations

import re
from typing import Any

_SYSTEM = re.compile(r"\s*<<SYS>>\n(.*?)\n<</SYS>>\n\n", re.DOTALL)


def parse_llama(text: str) -> list[dict[str, Any]]:
    """Reads a Llama 2 conversation. White space around contents is the format's, not theirs.

    Returns  messages; the last carries ``"is_complete": False`` if its ``[/INST]`` or ``</s>`` is missing

    >>> [message["role"] for message in parse_llama("<s>[INST] <<SYS>>\\nS\\n<</SYS>>\\n\\nHi [/INST] Hello </s>")]
    ['system', 'user', 'assistant']
    """
    messages: list[dict[str, Any]] = []
    for turn in text.split("[INST]")[1:]:
        turn = turn.rstrip().removesuffix("<s>")  # of the next turn
        if not messages and (system := _SYSTEM.match(turn)):
            messages.append({"role": "system", "content": system[1]})
            turn = turn[system.end() :]
        question, closed, rest = turn.partition("[/INST]")
        messages.append({"role": "user", "content": question.strip()})
        if not closed:
            messages[-1]["is_complete"] = False
            continue
        answer, ended, _ = rest.partition("</s>")
        if ended or answer.strip():
            messages.append({"role": "assistant", "content": answer.strip()})
            if not ended:
                messages[-1]["is_complete"] = False
    return messages
