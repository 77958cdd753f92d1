"""Language models as policies: the containers they read and write, and the wrappers that call an engine."""

from llmrl.modules.llm.policies.base import LLMWrapperBase
from llmrl.modules.llm.policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.modules.llm.policies.transformers_wrapper import TransformersWrapper

__all__ = ["ChatHistory", "LLMWrapperBase", "LogProbs", "Masks", "Text", "Tokens", "TransformersWrapper"]
