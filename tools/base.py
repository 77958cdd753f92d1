"""What a tool is: a name, a schema, and a call that answers with text. A function becomes one in ``function.py``.

A tool knows nothing of environments, tokens or batches. `ToolRunner` runs calls with their deadlines and bounds what
comes back; the environment transforms find the calls in what a model wrote and append the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from llmrl.errors import LLMRLError

__all__ = ["Status", "Tool", "ToolCall", "ToolError", "ToolResult", "ToolTimeout"]

Status = Literal["ok", "error", "timeout", "malformed", "unknown"]


class ToolError(LLMRLError):
    """A call that failed; the text is what the model is told."""


class ToolTimeout(ToolError, TimeoutError):
    """A call that was given up at its deadline; the text is what the model is told, output so far included."""


@dataclass(frozen=True)
class ToolCall:
    """One call that a model wrote. ``error`` says why it could not be parsed; the other fields are then what could."""

    name: str
    arguments: dict[str, Any] | None
    id: str
    conversation: Hashable = None
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """The answer to a call: text of bounded length, and how it came about."""

    call: ToolCall
    content: str
    status: Status
    duration_s: float
    cut: int = 0  # characters of the answer that were left out


class Tool(ABC):
    """The interface of a tool. A typed function is made into one by `as_tool`; subclass for state or a schema of yours.

    ``name``, ``description`` and ``parameters`` (a JSON schema of the arguments) are what the model is shown.
    ``timeout_s`` None leaves the deadline to the runner. ``keeps_deadline`` says that ``call`` returns by itself at its
    deadline: the runner then gives it a second to do so, and what it says about the timeout reaches the model.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout_s: float | None = None
    keeps_deadline: bool = True

    def schema(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        """Runs one call and blocks until it ends; calls of different conversations run at the same time.

        Reads    ``deadline``, a value of `time.monotonic`
        Returns  the text for the model
        Raises   ToolError with the text for the model, ToolTimeout for a call given up at its deadline
        """

    def end(self, conversation: Hashable) -> None:  # noqa: B027 - nothing to free is the usual case
        """The conversation is over: frees what is kept for it."""

    def close(self) -> None:  # noqa: B027
        """Frees everything; no call follows."""
