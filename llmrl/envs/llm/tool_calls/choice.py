"""Which call format: by name, by what the chat template tells its models, or by what an answer looks like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas
from llmrl.envs.llm.tool_calls.fence import PythonFence
from llmrl.envs.llm.tool_calls.functions import FunctionFormat
from llmrl.envs.llm.tool_calls.hermes import HermesFormat
from llmrl.envs.llm.tool_calls.llama import LlamaFormat
from llmrl.envs.llm.tool_calls.tagged import TaggedFormat
from llmrl.errors import ConfigError, near

__all__ = ["AnyFormat", "call_format", "format_of_template"]

_BY_NAME: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "qwen": HermesFormat,
    "llama": LlamaFormat,
    "function": FunctionFormat,
    "tagged": TaggedFormat,
    "xml": TaggedFormat,
    "python": PythonFence,
}


class AnyFormat(CallFormat):
    """Whatever each call of an answer looks like, of the formats that cannot be confused: for a model not known here.

    >>> [call.name for call in AnyFormat().parse('<tool>add\\n{}</tool> {"x": 1}\\n{"name": "sub", "parameters": {}}')]
    ['add', 'sub']
    """

    name = "auto"
    in_templates = True

    def __init__(self) -> None:
        self._formats: tuple[CallFormat, ...] = (FunctionFormat(), HermesFormat(), TaggedFormat(), LlamaFormat())
        # A Qwen 3 Coder call may stand in <tool_call> tags, which then open nothing.
        patterns = [f.opening.pattern for f in self._formats]
        patterns[1] += r"(?!\s*<function=)"
        self.opening = re.compile("|".join(patterns), re.MULTILINE)
        self.example = self._formats[1].example

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._formats[1].render(name, arguments)

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[ParsedCall | None, int]:
        for call_format in self._formats:
            own = call_format.opening.match(text, opening.start())
            if own and own.end() == opening.end():
                return call_format._read(text, own, schemas)
        return None, opening.end()


def call_format(name: str | CallFormat, template: str | None = None) -> CallFormat:
    """The format called ``name``; for "auto" that of the chat template, else whatever an answer looks like.

    Raises  ConfigError for an unknown name

    >>> call_format("qwen").name, call_format("auto").name
    ('hermes', 'auto')
    """
    if isinstance(name, CallFormat):
        return name
    if name == "auto":
        return (None if template is None else format_of_template(template)) or AnyFormat()
    if name not in _BY_NAME:
        known = ("auto", *_BY_NAME)
        raise ConfigError(f"format: must be one of {', '.join(known)}: got {name!r}.{near(str(name), known)}")
    return _BY_NAME[name]()


def format_of_template(template: str) -> CallFormat | None:
    """What a chat template (jinja text) tells its models to write; None where it declares no tools that we know."""
    if "<function=" in template:
        return FunctionFormat()
    if "<tool_call>" in template:
        return HermesFormat()
    if "ipython" in template and "parameters" in template:
        return LlamaFormat()
    return None
