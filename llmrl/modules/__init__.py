"""Modules that hold weights, or call an engine that holds them. Language models are in `llmrl.modules.llm`."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.rnn import GRUModule, LSTMModule
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["GRUModule", "LSTMModule"]
