"""`History` and `add_chat_template`, at the path under which TorchRL documents them."""

from llmrl.data.llm.history import History
from llmrl.data.llm.templates import add_chat_template

__all__ = ["History", "add_chat_template"]
