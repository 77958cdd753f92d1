"""Modules that hold weights, or call an engine that holds them. Language models are in `llmrl.modules.llm`."""

from llmrl.modules.rnn import GRUModule, LSTMModule

__all__ = ["GRUModule", "LSTMModule"]
