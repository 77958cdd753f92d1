# ruff: noqa: RUF001 (a marker of DeepSeek has full-width bars)
"""Which call format: by name, by what the chat template tells its models, or by what an answer looks like."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from llmrl.data.llm.parsers import thought_key
from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas
from llmrl.envs.llm.tool_calls.deepseek import DeepSeekFormat
from llmrl.envs.llm.tool_calls.fence import PythonFence
from llmrl.envs.llm.tool_calls.functions import FunctionFormat
from llmrl.envs.llm.tool_calls.harmony import HarmonyFormat
from llmrl.envs.llm.tool_calls.hermes import HermesFormat
from llmrl.envs.llm.tool_calls.llama import LlamaFormat
from llmrl.envs.llm.tool_calls.mistral import MistralFormat
from llmrl.envs.llm.tool_calls.tagged import TaggedFormat
from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object

__all__ = ["FORMATS", "AnyFormat", "call_format", "format_of_template"]

FORMATS: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "qwen": HermesFormat,
    "llama": LlamaFormat,
    "mistral": MistralFormat,
    "deepseek": DeepSeekFormat,
    "harmony": HarmonyFormat,
    "gpt_oss": HarmonyFormat,
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
        self._formats: tuple[CallFormat, ...] = (
            *(FunctionFormat(), HermesFormat(), TaggedFormat()),
            *(MistralFormat(), DeepSeekFormat(), HarmonyFormat(), LlamaFormat()),
        )
        # A Qwen 3 Coder call may stand in <tool_call> tags, which then open nothing.
        patterns = [f.opening.pattern for f in self._formats]
        patterns[1] += r"(?!\s*<function=)"
        self.opening = re.compile("|".join(patterns), re.MULTILINE)
        self.example = self._formats[1].example

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._formats[1].render(name, arguments)

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        for call_format in self._formats:
            own = call_format.opening.match(text, opening.start())
            if own and own.end() == opening.end():
                return call_format._read(text, own, schemas)
        return [], opening.end()


def call_format(name: str | CallFormat, template: str | None = None) -> CallFormat:
    """The format called ``name``, or ``"package.module:Class"``; for "auto" that of the chat template, else whatever an
    answer looks like.

    Raises  ConfigError for an unknown name

    >>> call_format("qwen").name, call_format("auto").name
    ('hermes', 'auto')
    """
    if isinstance(name, CallFormat):
        return name
    if name == "auto":
        return (None if template is None else format_of_template(template)) or AnyFormat()
    if ":" in name:
        return _of_own(name)
    if name not in FORMATS:
        known = ("auto", *FORMATS)
        raise ConfigError(
            f"format: must be one of {', '.join(known)}, or 'package.module:Class': got {name!r}."
            f"{did_you_mean(name, known)}"
        )
    return FORMATS[name]()


def _of_own(name: str) -> CallFormat:
    """A format of the user's: an object, or a class that needs no arguments."""
    found = load_object(name, what="format")
    if inspect.isclass(found) and issubclass(found, CallFormat):
        try:
            found = found()
        except TypeError as error:  # abstract, or it wants arguments
            raise ConfigError(f"format: {name!r} must be made without arguments: {error}.") from None
    if not isinstance(found, CallFormat):
        raise ConfigError(f"format: {name!r} must be a CallFormat (llmrl.envs.llm.tool_calls): it is {found!r:.80}.")
    return found


def format_of_template(template: str) -> CallFormat | None:
    """What a chat template (jinja text) tells its models to write; None where it declares no tools that we know."""
    if "<function=" in template:
        return FunctionFormat()
    if "<tool_call>" in template:
        return HermesFormat()
    if "[TOOL_CALLS]" in template:
        return MistralFormat(named="[ARGS]" in template)
    if "<｜tool▁call▁begin｜>" in template:
        return DeepSeekFormat(fenced="```json" in template)
    if "<|channel|>" in template and "functions." in template:
        return HarmonyFormat(thought_key(template))
    if "ipython" in template and "parameters" in template:
        return LlamaFormat()
    return None
