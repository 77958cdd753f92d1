"""The Python tool: runs a model's code in a sandbox and keeps the definitions of the conversation's earlier code."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from llmrl.errors import DeadlineError
from llmrl.tools.base import Tool, ToolError, ToolTimeout
from llmrl.tools.sandbox import Execution, InterpreterPool, Limits, Sandbox
from llmrl.tools.sandbox.launch import Kind
from llmrl.tools.schema import Signature


def python(code: str) -> str:
    """Run Python code and return what it prints, and the value of its last line.

    Args:
        code: the code, as in a file
    """
    raise AssertionError("read for its signature alone")


_SIGNATURE = Signature(python, "python")


class PythonTool(Tool):
    """One sandboxed interpreter per conversation; `llmrl.tools.sandbox.Sandbox` describes the protection.

    With ``persistent=False`` every call runs in a process forked for it, and only its files remain. Processes that
    the code starts end with the call; threads are paused until the next one. A call that takes too long is killed with
    everything it started; its output is kept, and the conversation's next call gets a new interpreter.

    ``limits`` may be a mapping from names to values of some limits, as in a recipe.

    Raises   at construction, ConfigError for an invalid limit; MissingDependencyError or UnsupportedError if
             the sandbox cannot run

    >>> import time
    >>> tool = PythonTool(sandbox="subprocess")
    >>> tool.call({"code": "print(6 * 7)"}, conversation=0, deadline=time.monotonic() + 30)
    '42\\n'
    >>> tool.close()
    """

    def __init__(
        self,
        *,
        persistent: bool = True,
        sandbox: Kind = "bubblewrap",
        limits: Limits | Mapping[str, int] | None = None,
        python: str | None = None,
        spare: int = 1,
        max_interpreters: int = 64,
        timeout_s: float | None = None,
        name: str = "python",
    ):
        self.name = name
        self.persistent = persistent
        self.timeout_s = timeout_s
        state = "Variables, functions and imports stay for later calls." if persistent else "Every call starts afresh."
        self.description = f"{_SIGNATURE.description} {state}"
        self.parameters = _SIGNATURE.json_schema
        made = Sandbox(sandbox, Limits.of(limits), python)
        self.pool = InterpreterPool(made, spare=spare, max_interpreters=max_interpreters)

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        _, values = _SIGNATURE.bind(arguments)
        try:
            result = self.execute(values["code"], conversation=conversation, deadline=deadline)
        except DeadlineError as error:
            raise ToolTimeout(str(error)) from None
        text = report(result)
        if result.status != "ok":
            raise (ToolTimeout if result.status == "timeout" else ToolError)(text)
        return text

    def execute(self, code: str, *, conversation: Hashable = None, deadline: float) -> Execution:
        """Runs code and returns the structured result, for callers other than a model."""
        return self.pool.run(code, conversation=conversation, deadline=deadline, fresh=not self.persistent)

    def end(self, conversation: Hashable) -> None:
        self.pool.end(conversation)

    def close(self) -> None:
        self.pool.close()


def report(result: Execution) -> str:
    """The result as the model reads it: a note if earlier variables are gone, the output, the error.

    >>> print(report(Execution("error", "1\\n", error="ValueError: no")))
    1
    ValueError: no
    """
    parts = []
    if result.lost_before:
        parts.append(f"[The interpreter was restarted: {result.lost_before}. Earlier variables are gone.]\n")
    parts.append(result.output)
    if result.error:
        if result.output and not result.output.endswith("\n"):
            parts.append("\n")
        parts.append(result.error)
    if result.lost_after:
        parts.append("\n[The interpreter was restarted: earlier variables are gone.]")
    return "".join(parts) or "(no output)"
