"""Collectors for conversations."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.llm.collector import LLMCollector
    from llmrl.collectors.llm.ray import RayLLMCollector
    from llmrl.collectors.llm.weight_update import vLLMUpdater
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["LLMCollector", "RayLLMCollector", "vLLMUpdater"]
