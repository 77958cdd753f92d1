"""Engines: prompt ids in, sampled ids out. The protocol is in ``base``; each backend has its own file."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.modules.llm.engines.base import Engine, Generation, SamplingParams, StopReason
    from llmrl.modules.llm.engines.transformers import TransformersEngine
    from llmrl.modules.llm.engines.vllm import AsyncVLLMEngine, VLLMEngine
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AsyncVLLMEngine",
    "Engine",
    "Generation",
    "SamplingParams",
    "StopReason",
    "TransformersEngine",
    "VLLMEngine",
]
