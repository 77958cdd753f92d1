"""Tools that a model can call during a rollout: the interface, the runner, and the built-in tools."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.tools.base import Tool, ToolCall, ToolError, ToolResult, ToolTimeout
    from llmrl.tools.function import FunctionTool, as_tool, tool
    from llmrl.tools.load import load_tool
    from llmrl.tools.runner import ToolRunner
else:
    __getattr__, __dir__ = on_demand(__name__)

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
