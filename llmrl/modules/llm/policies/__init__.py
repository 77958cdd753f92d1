"""Language models as policies: the containers that they read and write, and the wrappers that call an engine."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.modules.llm.policies.base import Backend, LLMWrapperBase
    from llmrl.modules.llm.policies.batching import BatchingEngine
    from llmrl.modules.llm.policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens
    from llmrl.modules.llm.policies.scoring import TokenCategorical
    from llmrl.modules.llm.policies.transformers_wrapper import TransformersWrapper
    from llmrl.modules.llm.policies.vllm_wrapper import vLLMWrapper
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "Backend",
    "BatchingEngine",
    "ChatHistory",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "Text",
    "TokenCategorical",
    "Tokens",
    "TransformersWrapper",
    "vLLMWrapper",
]
