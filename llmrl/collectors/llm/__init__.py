"""Collectors for conversations."""

from llmrl.collectors.llm.collector import LLMCollector
from llmrl.collectors.llm.ray import RayLLMCollector
from llmrl.collectors.llm.weight_update import vLLMUpdater

__all__ = ["LLMCollector", "RayLLMCollector", "vLLMUpdater"]
