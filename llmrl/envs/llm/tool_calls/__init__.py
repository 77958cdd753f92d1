"""How models write tool calls: one small parser per format, and the choice among them."""

from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall
from llmrl.envs.llm.tool_calls.choice import AnyFormat, call_format, format_of_template
from llmrl.envs.llm.tool_calls.deepseek import DeepSeekFormat
from llmrl.envs.llm.tool_calls.fence import PythonFence
from llmrl.envs.llm.tool_calls.functions import FunctionFormat
from llmrl.envs.llm.tool_calls.harmony import HarmonyFormat
from llmrl.envs.llm.tool_calls.hermes import HermesFormat
from llmrl.envs.llm.tool_calls.llama import LlamaFormat
from llmrl.envs.llm.tool_calls.mistral import MistralFormat
from llmrl.envs.llm.tool_calls.tagged import PatternFormat, TaggedFormat

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
