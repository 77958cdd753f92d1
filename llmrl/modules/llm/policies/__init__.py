"""Language models as policies: the containers that they read and write, and the wrappers that call an engine."""

from llmrl.modules.llm.policies.base import Backend, LLMWrapperBase
from llmrl.modules.llm.policies.batching import BatchingEngine
from llmrl.modules.llm.policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.modules.llm.policies.scoring import TokenCategorical
from llmrl.modules.llm.policies.wrappers import TransformersWrapper, vLLMWrapper

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
