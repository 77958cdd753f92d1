"""vLLM as an engine: in this process, in a subprocess, or behind a URL. vLLM is imported when an engine is built."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.modules.llm.engines.vllm.engine import AsyncVLLMEngine, VLLMEngine
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["AsyncVLLMEngine", "VLLMEngine"]
