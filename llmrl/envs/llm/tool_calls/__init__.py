"""Tool call formats: the scanner for answers, one class per format, and the selection of a format."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall
    from llmrl.envs.llm.tool_calls.choice import AnyFormat, call_format, format_of_template
    from llmrl.envs.llm.tool_calls.formats import (
        DeepSeekFormat,
        FunctionFormat,
        HarmonyFormat,
        HermesFormat,
        LlamaFormat,
        MistralFormat,
        PatternFormat,
        PythonFence,
        TaggedFormat,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AnyFormat",
    "CallFormat",
    "DeepSeekFormat",
    "FunctionFormat",
    "HarmonyFormat",
    "HermesFormat",
    "LlamaFormat",
    "MistralFormat",
    "ParsedCall",
    "PatternFormat",
    "PythonFence",
    "TaggedFormat",
    "call_format",
    "format_of_template",
]
