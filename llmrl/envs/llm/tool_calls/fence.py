"""Python code in Markdown fences, each a call of the interpreter: for models that were taught no call format at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas

__all__ = ["PythonFence"]

_RUNS = re.compile(r"`{3,}")


class PythonFence(CallFormat):
    """Every fence that says ``python``, ``py`` or ``python3``, in any case, is a call with the argument "code".

    >>> PythonFence("python").parse("Let us see:\\n```py\\nprint(1)\\n```")
    [ParsedCall(name='python', arguments={'code': 'print(1)'}, error=None)]
    """

    name = "python"
    opening = re.compile(r"^[ \t]*(`{3,})[ \t]*(?:python[0-9.]*|py)[ \t]*\r?\n", re.MULTILINE | re.IGNORECASE)
    example = "```python\nprint(1 + 1)\n```"

    def __init__(self, tool: str = "python") -> None:
        self.tool = tool

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        code = arguments["code"]
        fence = "`" * max([3, *(len(run) + 1 for run in _RUNS.findall(code))])
        return f"{fence}python\n{code}\n{fence}"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        close = re.compile(rf"^[ \t]*`{{{len(opening[1])},}}[ \t]*\r?$", re.MULTILINE).search(text, opening.end())
        if close is None:
            return self._malformed("the code block does not end with ```", self.tool), len(text)
        code = text[opening.end() : max(opening.end(), close.start() - 1)]
        return [ParsedCall(self.tool, {"code": code})], close.end()
