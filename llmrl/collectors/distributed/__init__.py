"""Collectors on several machines."""

from llmrl.collectors.distributed.ray import RayCollector

__all__ = ["RayCollector"]
