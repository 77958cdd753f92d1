"""Runs a model's Python code in sandboxed interpreters, one for each conversation."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.tools.sandbox.launch import Sandbox
    from llmrl.tools.sandbox.limits import Limits
    from llmrl.tools.sandbox.pool import InterpreterPool
    from llmrl.tools.sandbox.session import Execution
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["Execution", "InterpreterPool", "Limits", "Sandbox"]
