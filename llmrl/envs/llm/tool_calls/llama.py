"""Calls as Llama 3 models write them: a JSON object with name and parameters, with or without ``<|python_tag|>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text
from llmrl.strict_json import JSONError, read_json

__all__ = ["LlamaFormat"]

_TAG = "<|python_tag|>"


class LlamaFormat(CallFormat):
    """{"name": ..., "parameters": {...}} at the start of a line; several are separated by ``;`` or line ends.

    A JSON object without a name is no call, unless ``<|python_tag|>`` says that it is one.

    >>> LlamaFormat().parse('{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}')[1]
    ParsedCall(name='sub', arguments={}, error=None)
    """

    name = "llama"
    in_templates = True
    opening = re.compile(r"<\|python_tag\|>|(?:^|;)[ \t]*(?=\{)", re.MULTILINE)
    example = '{"name": "<tool>", "parameters": {...}}'

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{{"name": {json_text(name)}, "parameters": {json_text(dict(arguments))}}}'

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> tuple[list[ParsedCall], int]:
        tagged = opening[0].startswith(_TAG)
        begun = text[opening.end() : opening.end() + _NAME_WITHIN].partition("\n")[0]
        if not tagged and '"name"' not in begun and not _OBJECT.match(text, opening.end()):
            return [], opening.end() + 1
        try:
            value, end = read_json(text, opening.end())
        except JSONError as error:
            if tagged or '"name"' in begun:
                line_end = text.find("\n", opening.end())
                return self._malformed(str(error)), len(text) if line_end < 0 else line_end
            return [], error.place  # it is JSON up to there
        if not tagged and not (isinstance(value, dict) and "name" in value and value.keys() & _ARGUMENTS):
            return [], end
        return self._of_object(value), end


_ARGUMENTS = {"parameters", "arguments"}
_OBJECT = re.compile(r"\{\s*+[\"}]")
_NAME_WITHIN = 200  # characters: a call that cannot be read says its name there
