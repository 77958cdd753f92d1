"""Runs a model's Python code in sandboxed interpreters, one for each conversation."""

from llmrl.tools.sandbox.launch import Sandbox
from llmrl.tools.sandbox.limits import Limits
from llmrl.tools.sandbox.pool import InterpreterPool
from llmrl.tools.sandbox.session import Execution

__all__ = ["Execution", "InterpreterPool", "Limits", "Sandbox"]
