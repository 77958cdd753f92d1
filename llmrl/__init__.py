"""llmrl: post-training for language models.

The names below are those of a first loop. Each is loaded when it is first used, from the sub-package that documents it;
``import llmrl`` itself loads nothing.
"""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.llm import LLMCollector
    from llmrl.data import LazyStackStorage, ReplayBuffer
    from llmrl.data.llm import History
    from llmrl.envs.llm import ChatEnv, DatasetChatEnv
    from llmrl.envs.llm.transforms import RewardFunction, ToolTransform
    from llmrl.modules.llm import TransformersWrapper, vLLMWrapper
    from llmrl.objectives.llm import DPOLoss, GRPOLoss, MCAdvantage, SFTLoss
else:
    __getattr__, __dir__ = on_demand(__name__)

__version__ = "0.1.0"

__all__ = [
    "ChatEnv",
    "DPOLoss",
    "DatasetChatEnv",
    "GRPOLoss",
    "History",
    "LLMCollector",
    "LazyStackStorage",
    "MCAdvantage",
    "ReplayBuffer",
    "RewardFunction",
    "SFTLoss",
    "ToolTransform",
    "TransformersWrapper",
    "vLLMWrapper",
]
