# ruff: noqa: RUF001 (a marker of DeepSeek has full-width bars)
"""Selects a call format: by name, by the tool section of the chat template, or by the form of each call."""

from __future__ import annotations

import inspect
import re

from llmrl.data.llm.parsers.gpt_oss import thought_key
from llmrl.envs.llm.tool_calls import formats
from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas
from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object

FORMATS: dict[str, type[CallFormat]] = {
    "hermes": formats.HermesFormat,
    "qwen": formats.HermesFormat,
    "llama": formats.LlamaFormat,
    "mistral": formats.MistralFormat,
    "deepseek": formats.DeepSeekFormat,
    "harmony": formats.HarmonyFormat,
    "gpt_oss": formats.HarmonyFormat,
    "function": formats.FunctionFormat,
    "tagged": formats.TaggedFormat,
    "xml": formats.TaggedFormat,
    "python": formats.PythonFence,
}
_TOLD_APART = ("function", "hermes", "tagged", "mistral", "deepseek", "harmony", "llama")


class AnyFormat(CallFormat):
    """Detects the format of each call, among formats that cannot be confused: for templates without a known format.

    >>> [call.name for call in AnyFormat().parse('<tool>add\\n{}</tool> {"x": 1}\\n{"name": "sub", "parameters": {}}')]
    ['add', 'sub']
    """

    name = "auto"
    in_templates = True

    def __init__(self) -> None:
        self._formats = {name: FORMATS[name]() for name in _TOLD_APART}
        patterns = {name: call_format.opening.pattern for name, call_format in self._formats.items()}
        # <tool_call> tags around a Qwen 3 Coder call do not begin a Hermes call.
        patterns["hermes"] += r"(?!\s*<function=)"
        self.opening = re.compile("|".join(patterns.values()), re.MULTILINE)
        self.example = self._formats["hermes"].example

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        for call_format in self._formats.values():
            own = call_format.opening.match(text, opening.start())
            if own and own.end() == opening.end():
                return call_format._read(text, own, schemas)
        return [], opening.end()


def call_format(name: str | CallFormat, template: str | None = None) -> CallFormat:
    """The format for a name or ``"package.module:Class"``; for "auto" the chat template's, else `AnyFormat`.

    Raises  ConfigError for an unknown name, or for an object that is not a `CallFormat`

    >>> call_format("qwen").name, call_format("auto").name
    ('hermes', 'auto')
    """
    if isinstance(name, CallFormat):
        return name
    if name == "auto":
        return (None if template is None else format_of_template(template)) or AnyFormat()
    if ":" not in name:
        if name not in FORMATS:
            known = ("auto", *FORMATS)
            hint, names = did_you_mean(name, known), ", ".join(known)
            raise ConfigError(f"format: must be one of {names}, or 'package.module:Class': got {name!r}.{hint}")
        return FORMATS[name]()
    found = load_object(name, what="format")
    if inspect.isclass(found) and issubclass(found, CallFormat):
        try:
            found = found()
        except TypeError as error:  # abstract, or its constructor requires arguments
            raise ConfigError(f"format: {name!r} must be made without arguments: {error}.") from None
    if not isinstance(found, CallFormat):
        raise ConfigError(f"format: {name!r} must be a CallFormat (llmrl.envs.llm.tool_calls): it is {found!r:.80}.")
    return found


def format_of_template(template: str) -> CallFormat | None:
    """The format that a chat template (jinja text) describes; None if it has no known tool section."""
    # Must precede the Hermes check: templates of Qwen 3 Coder contain both tags.
    if "<function=" in template:
        return formats.FunctionFormat()
    if "<tool_call>" in template:
        return formats.HermesFormat()
    if "[TOOL_CALLS]" in template:
        return formats.MistralFormat(named="[ARGS]" in template)
    if "<｜tool▁call▁begin｜>" in template:
        return formats.DeepSeekFormat(fenced="```json" in template)
    if "<|channel|>" in template and "functions." in template:
        return formats.HarmonyFormat(thought_key(template))
    if "ipython" in template and "parameters" in template:
        return formats.LlamaFormat()
    return None
