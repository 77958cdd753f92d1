"""Tool transforms with built-in tools: a Python interpreter, a browser, MCP servers.

In all of them ``tool_name`` is the role of the messages, ``timeout`` the seconds for one call, and ``options`` are the
other arguments of `ToolTransform`. For a browser and MCP servers the default ``format`` is ``<tool>name``, newline,
``{...}</tool>``, which the system prompt must explain (:meth:`ToolTransform.instructions`); with "auto" the chat
template does so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmrl.envs.llm.tool_calls import CallFormat, PatternFormat, PythonFence
from llmrl.envs.llm.transforms.tools import ToolTransform
from llmrl.errors import ConfigError, did_you_mean
from llmrl.tools import Tool, ToolResult
from llmrl.tools.browser import BrowserTool
from llmrl.tools.mcp_client import MCPServers
from llmrl.tools.python import PythonTool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PythonInterpreter(ToolTransform):
    """A `ToolTransform` whose calls are fenced code blocks marked ``python``, ``py`` or ``python3``.

    Writes  a message per block, "Code block N executed successfully:" or "Code block N failed:" and its output
    Raises  UnsupportedError or MissingDependencyError if the sandbox is missing; ConfigError for an absent service

    persistent  True keeps the names that a block defines for later blocks and turns of its conversation
    timeout     seconds after which a block is killed with all its child processes
    services    a mapping of tools that several environments share, with the interpreter under ``service_name``; with
                ``namespace``, a mapping of such mappings
    sandbox     "bubblewrap", or "subprocess", which gives no protection: see `llmrl.tools.sandbox.Sandbox`

    No schema is declared, so the prompt must tell the model that its code is run.

    >>> from tensordict import TensorDict
    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = ChatEnv(batch_size=[1]).append_transform(PythonInterpreter(sandbox="subprocess", timeout=30))
    >>> td = env.reset(TensorDict(query="6 * 7?", batch_size=[1]))
    >>> td = env.step(ScriptedPolicy(["```python\\nprint(6 * 7)\\n```"])(td))
    >>> print(td["next", "history"].prompt.to_chats()[0][-1]["content"])
    Code block 1 executed successfully:
    42
    >>> env.close()
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: Mapping[str, Any] | None = None,
        service_name: str = "python_executor",
        namespace: str | None = None,
        *,
        sandbox: str = "bubblewrap",
        **options: Any,
    ):
        shared = _service(services, service_name, namespace)
        tool = PythonTool(persistent=persistent, sandbox=sandbox) if shared is None else shared
        fence = PythonFence("python" if shared is None else shared.name)
        super().__init__([tool], format=fence, timeout_s=timeout, role=tool_name, tokenizer=tokenizer, **options)
        self._shared = shared is not None

    def _content(self, result: ToolResult, number: int) -> str:
        how = "executed successfully" if result.status == "ok" else "failed"
        return f"Code block {number} {how}:\n{result.content}"

    def close(self) -> None:
        """Ends the interpreters, unless they belong to a shared service."""
        if not self._shared:
            super().close()


class BrowserTransform(ToolTransform):
    """A `ToolTransform` with a browser: navigate, click, type, extract and scroll, with one page per conversation.

    Raises  ConfigError for a domain that is not a plain host name; MissingDependencyError without Playwright

    allowed_domains  exact host names for pages, their resources and redirects; sub-domains must be listed; None: all
    headless         False shows the window
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] | None = None,
        headless: bool = True,
        timeout: float = 30.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tool_name: str = "tool",
        *,
        format: str | CallFormat = "tagged",
        **options: Any,
    ):
        browser = BrowserTool(allowed_domains, headless=headless, timeout_s=timeout)
        super().__init__([browser], format=format, timeout_s=timeout, role=tool_name, tokenizer=tokenizer, **options)


class MCPToolTransform(ToolTransform):
    """A `ToolTransform` with every tool of some MCP servers.

    Raises  ConfigError or DeadlineError for a server that does not start, with its output on stderr;
            MissingDependencyError without the package "mcp"

    servers            name -> {"command", "args", "env", "cwd"} or {"url", "headers"}; see `MCPServers`
    tool_call_pattern  a regular expression for a call: its groups are the tool's name and its JSON arguments
    start_timeout      seconds until all servers have listed their tools
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
        **options: Any,
    ):
        if tool_call_pattern is not None:
            format = PatternFormat(tool_call_pattern)
        self.servers = MCPServers(servers, start_timeout_s=start_timeout)
        try:
            super().__init__(self.servers.tools, format=format, timeout_s=timeout, role=tool_name, **options)
        except BaseException:
            self.servers.close()
            raise


def _service(services: Mapping[str, Any] | None, name: str, namespace: str | None) -> Tool | None:
    if namespace is not None:
        services = None if services is None else services.get(namespace)
        if services is None:
            raise ConfigError(f"PythonInterpreter: namespace {namespace!r} must be a key of services: it is missing.")
    if services is None:
        return None
    if not isinstance(services, Mapping) or not isinstance(tool := services.get(name), Tool):
        known = list(services) if isinstance(services, Mapping) else []
        got = f"{known or services!r}.{did_you_mean(name, map(str, known))}"
        raise ConfigError(f"PythonInterpreter: services must hold a tool called {name!r}: got {got}")
    return tool
