"""Modules: what holds weights or calls an engine that does. Language models are in `llmrl.modules.llm`."""

from llmrl.modules.rnn import GRUModule, LSTMModule

__all__ = ["GRUModule", "LSTMModule"]
