"""`PythonInterpreter`: runs the Python code blocks of a turn. The sandbox is `llmrl.tools.python`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmrl.envs.llm.tool_calls import PythonFence
from llmrl.envs.llm.transforms.tools import ToolTransform
from llmrl.errors import ConfigError, did_you_mean
from llmrl.tools import Tool, ToolResult
from llmrl.tools.python import PythonTool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PythonInterpreter"]


class PythonInterpreter(ToolTransform):
    """A `ToolTransform` whose calls are fenced code blocks that say ``python``, ``py`` or ``python3``.

    Writes  a message per block, "Code block N executed successfully:" or "Code block N failed:" and what it printed
    Raises  UnsupportedError or MissingDependencyError where the sandbox cannot be had; ConfigError for a service that
            is not there

    tool_name      the role of the messages
    persistent     what a block defines is there in later blocks and turns of its conversation
    timeout        seconds for one block, after which it is killed with all that it started
    sandbox        "bubblewrap", or "subprocess", which protects nothing: see `llmrl.tools.sandbox.Sandbox`
    services       a mapping of tools that several environments share, with the interpreter under ``service_name``; with
                   ``namespace``, a mapping of such mappings

    The prompt should say that the model can run code; no schema is declared.

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
        max_calls_per_turn: int = 8,
        max_result_chars: int = 4000,
        max_tool_turns: int | None = None,
        end_without_call: bool = True,
    ):
        tool = _service(services, service_name, namespace)
        super().__init__(
            [PythonTool(persistent=persistent, sandbox=sandbox) if tool is None else tool],
            format=PythonFence("python" if tool is None else tool.name),
            timeout_s=timeout,
            max_calls_per_turn=max_calls_per_turn,
            max_result_chars=max_result_chars,
            max_tool_turns=max_tool_turns,
            end_without_call=end_without_call,
            role=tool_name,
            tokenizer=tokenizer,
        )
        self._shared = tool is not None

    def _content(self, result: ToolResult, number: int) -> str:
        how = "executed successfully" if result.status == "ok" else "failed"
        return f"Code block {number} {how}:\n{result.content}"

    def close(self) -> None:
        """Ends the interpreters, unless they are a service's."""
        if not self._shared:
            super().close()


def _service(services: Mapping[str, Any] | None, name: str, namespace: str | None) -> Tool | None:
    """The tool of that name among the services; None where there are none."""
    if namespace is not None:
        services = None if services is None else services.get(namespace)
        if services is None:
            raise ConfigError(f"PythonInterpreter: namespace {namespace!r} must be one of the services: it is not.")
    if services is None:
        return None
    if not isinstance(services, Mapping) or not isinstance(tool := services.get(name), Tool):
        known = list(services) if isinstance(services, Mapping) else []
        raise ConfigError(
            f"PythonInterpreter: services must hold a tool called {name!r}: got {known or services!r}."
            f"{did_you_mean(name, map(str, known))}"
        )
    return tool
