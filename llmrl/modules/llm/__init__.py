"""Language models as policies: renderers of conversations, engines that sample, wrappers on TensorDicts."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand
from llmrl.modules.llm import engines, policies

if TYPE_CHECKING:
    from llmrl.modules.llm.backends.vllm import LLMOnDevice, make_vllm_worker, stateless_init_process_group, vLLMWorker
    from llmrl.modules.llm.engines import *  # noqa: F403
    from llmrl.modules.llm.log_probs import TokenScorer, TokenScores, token_logprobs
    from llmrl.modules.llm.packing import Packed, pack, why_not_packed
    from llmrl.modules.llm.policies import *  # noqa: F403
    from llmrl.modules.llm.rendering import Rendered, Renderer, TemplateReport
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "LLMOnDevice",
    "Packed",
    "Rendered",
    "Renderer",
    "TemplateReport",
    "TokenScorer",
    "TokenScores",
    "make_vllm_worker",
    "pack",
    "stateless_init_process_group",
    "token_logprobs",
    "vLLMWorker",
    "why_not_packed",
]
__all__ += engines.__all__
__all__ += policies.__all__
