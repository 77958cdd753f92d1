"""Collectors for conversations."""

from llmrl.collectors.llm.collector import LLMCollector

__all__ = ["LLMCollector"]
