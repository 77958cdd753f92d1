"""Where in a response the answer stands: thinking and answer tags, ``\\boxed{}``, fenced code. It is not read here."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Blocks", "code_block", "extract_tags", "fenced_blocks", "find_blocks", "last_boxed"]

_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```(?P<info>[^`\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t]*([\w+.-]*)")
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True)
class Blocks:
    """A response taken apart: ``thoughts``, the ``answers`` outside of them, and all text ``outside`` of thinking."""

    thoughts: list[str]
    answers: list[str]
    outside: str


def find_blocks(text: str) -> Blocks:
    """The thinking and answer blocks of a response. An answer block inside the thinking does not count.

    Thinking that is never closed goes on to the end; a lone ``</think>`` ends thinking that the prompt has opened.

    >>> find_blocks("<think>7? <answer>7</answer></think><answer>8</answer>").answers
    ['8']
    """
    thoughts = _THINK.findall(text)
    outside = _THINK.sub("", text)
    if "</think>" in outside:
        before, _, outside = outside.rpartition("</think>")
        thoughts.insert(0, before)
    return Blocks(thoughts, _ANSWER.findall(outside), outside)


def extract_tags(text: str) -> tuple[str | None, str | None]:
    """(thinking, last answer) of a response, each None where there is none."""
    blocks = find_blocks(text)
    return "\n".join(blocks.thoughts) if blocks.thoughts else None, blocks.answers[-1] if blocks.answers else None


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{}`` holds, its own braces included; None where there is no box.

    >>> last_boxed(r"so \\boxed{3}, or rather \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return text[start:]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(what follows the opening fence, the lines up to the closing one) of each block outside thinking.

    >>> fenced_blocks("```sh\\nls\\n```\\n```\\nnot closed")
    [('sh', 'ls\\n')]
    """
    text = find_blocks(text).outside
    blocks, opening = [], None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence["info"].strip():
            blocks.append((opening["info"], text[opening.end() + 1 : fence.start()]))
            opening = None
    return blocks


def code_block(text: str, languages: tuple[str, ...] = ("python", "python3", "py", "")) -> str | None:
    """The last fenced block outside thinking in one of ``languages``; None where there is none.

    >>> code_block("```python\\nprint(1)\\n```\\nwhich prints\\n```text\\n1\\n```")
    'print(1)\\n'
    """
    found = [code for info, code in fenced_blocks(text) if _LANGUAGE.match(info)[1].lower() in languages]
    return found[-1] if found else None
