"""Tools that a model can call during a rollout: the interface, the runner, and the built-in tools."""

from llmrl.tools.base import Tool, ToolCall, ToolError, ToolResult, ToolTimeout
from llmrl.tools.function import FunctionTool, as_tool, tool
from llmrl.tools.load import load_tool
from llmrl.tools.runner import ToolRunner

__all__ = [
    "FunctionTool",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "ToolRunner",
    "ToolTimeout",
    "as_tool",
    "load_tool",
    "tool",
]
