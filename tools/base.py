"""The interface of a tool: a name, a schema, and a call that returns text. `FunctionTool` wraps a function as a tool.

A tool is independent of environments, tokens and batches. `ToolRunner` runs calls with deadlines and limits the size of
results; the environment transforms find the calls in a model's text and append the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from llmrl.errors import LLMRLError

Status = Literal["ok", "error", "timeout", "malformed", "unknown"]


class ToolError(LLMRLError):
    """A call that failed; its text is the answer that the model reads."""


class ToolTimeout(ToolError, TimeoutError):
    """A call that was stopped at its deadline; its text, with the output so far, is the answer that the model reads."""


@dataclass(frozen=True)
class ToolCall:
    """One call that a model wrote. ``error`` says why it could not be parsed; the other fields hold what could be."""

    name: str
    arguments: dict[str, Any] | None
    id: str
    conversation: Hashable = None
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """The answer to a call: text of bounded length, and how the call ended."""

    call: ToolCall
    content: str
    status: Status
    duration_s: float
    cut: int = 0  # characters of the answer that were left out


class Tool(ABC):
    """The interface of a tool. `as_tool` wraps a typed function; subclass to write your own schema.

    The model sees ``name``, ``description`` and ``parameters``, a JSON schema of the arguments. With ``timeout_s`` None
    the runner sets the deadline. ``keeps_deadline`` True: ``call`` returns by itself at its deadline; the runner gives
    it one more second to do so, and the text of its ToolTimeout reaches the model.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout_s: float | None = None
    keeps_deadline: bool = True

    def schema(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        """Runs one call and blocks until it ends; calls of different conversations run at the same time.

        Reads    ``deadline``, a value of `time.monotonic`
        Returns  the text for the model
        Raises   ToolError with the text for the model, ToolTimeout at the deadline
        """

    def end(self, conversation: Hashable) -> None:  # noqa: B027 - nothing to free is the usual case
        """Frees the state of a finished conversation."""

    def close(self) -> None:  # noqa: B027
        """Frees everything; no calls are made afterwards."""
