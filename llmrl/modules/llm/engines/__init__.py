"""Engines: prompt ids in, sampled ids out. The protocol is in ``base``; each backend has its own file."""

from llmrl.modules.llm.engines.base import Engine, Generation, SamplingParams, StopReason
from llmrl.modules.llm.engines.transformers import TransformersEngine
from llmrl.modules.llm.engines.vllm import AsyncVLLMEngine, VLLMEngine

__all__ = [
    "AsyncVLLMEngine",
    "Engine",
    "Generation",
    "SamplingParams",
    "StopReason",
    "TransformersEngine",
    "VLLMEngine",
]
