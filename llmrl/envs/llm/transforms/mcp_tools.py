"""`MCPToolTransform`: the tools of MCP servers. Connections are `llmrl.tools.mcp_client`'s."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmrl.envs.llm.tool_calls import CallFormat, PatternFormat
from llmrl.envs.llm.transforms.tools import ToolTransform
from llmrl.tools.mcp_client import MCPServers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MCPToolTransform"]


class MCPToolTransform(ToolTransform):
    """A `ToolTransform` with every tool of some MCP servers.

    Raises  ConfigError or DeadlineError for a server that does not start, with what it wrote to stderr;
            MissingDependencyError without the package "mcp"

    servers            name -> {"command", "args", "env", "cwd"} or {"url", "headers"}; see `MCPServers`
    tool_call_pattern  a regular expression for a call: its groups are the tool's name and its JSON arguments
    tool_name          the role of the messages
    timeout            seconds for one call
    start_timeout      seconds until all servers have listed their tools
    format             how the model writes calls where there is no pattern: by default
                       ``<tool>name`` line end ``{...}</tool>``, of which a system prompt has to tell it
                       (:meth:`instructions`); with "auto" the chat template does
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any] | str],
        tool_call_pattern: str | re.Pattern[str] | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
        *,
        start_timeout: float = 30.0,
        format: str | CallFormat = "tagged",
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_calls_per_turn: int = 8,
        max_result_chars: int = 4000,
        max_tool_turns: int | None = None,
        end_without_call: bool = True,
        declare: bool | None = None,
    ):
        if tool_call_pattern is not None:
            format = PatternFormat(tool_call_pattern)
        self.servers = MCPServers(servers, start_timeout_s=start_timeout)
        try:
            super().__init__(
                self.servers.tools,
                format=format,
                timeout_s=timeout,
                max_calls_per_turn=max_calls_per_turn,
                max_result_chars=max_result_chars,
                max_tool_turns=max_tool_turns,
                end_without_call=end_without_call,
                declare=declare,
                role=tool_name,
                tokenizer=tokenizer,
            )
        except BaseException:
            self.servers.close()
            raise
