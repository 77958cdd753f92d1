"""Language models as policies: renderers of conversations, engines that sample, wrappers on TensorDicts."""

from __future__ import annotations

from llmrl.modules.llm.backends.vllm import LLMOnDevice, make_vllm_worker, stateless_init_process_group, vLLMWorker
from llmrl.modules.llm.engines import (
    AsyncVLLMEngine,
    Engine,
    Generation,
    SamplingParams,
    StopReason,
    TransformersEngine,
    VLLMEngine,
)
from llmrl.modules.llm.log_probs import TokenScorer, TokenScores, token_logprobs
from llmrl.modules.llm.packing import Packed, pack, why_not_packed
from llmrl.modules.llm.policies import (
    Backend,
    BatchingEngine,
    ChatHistory,
    LLMWrapperBase,
    LogProbs,
    Masks,
    Text,
    TokenCategorical,
    Tokens,
    TransformersWrapper,
    vLLMWrapper,
)
from llmrl.modules.llm.rendering import Rendered, Renderer, TemplateReport

__all__ = [
    "AsyncVLLMEngine",
    "Backend",
    "BatchingEngine",
    "ChatHistory",
    "Engine",
    "Generation",
    "LLMOnDevice",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "Packed",
    "Rendered",
    "Renderer",
    "SamplingParams",
    "StopReason",
    "TemplateReport",
    "Text",
    "TokenCategorical",
    "TokenScorer",
    "TokenScores",
    "Tokens",
    "TransformersEngine",
    "TransformersWrapper",
    "VLLMEngine",
    "make_vllm_worker",
    "pack",
    "stateless_init_process_group",
    "token_logprobs",
    "vLLMWorker",
    "vLLMWrapper",
    "why_not_packed",
]
