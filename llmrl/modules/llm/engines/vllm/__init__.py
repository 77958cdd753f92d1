"""vLLM as an engine: in this process, in a subprocess, or behind a URL. vLLM is imported when an engine is built."""

from llmrl.modules.llm.engines.vllm.engine import AsyncVLLMEngine, VLLMEngine

__all__ = ["AsyncVLLMEngine", "VLLMEngine"]
