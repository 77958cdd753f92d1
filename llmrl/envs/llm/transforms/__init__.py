"""Transforms for chat environments: prompts from data, tools, rewards, length penalties, the policy version."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.ragged.padding import as_nested_tensor, as_padded_tensor
    from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer, EndOfData
    from llmrl.envs.llm.transforms.kl import KLComputation, KLRewardTransform, RetrieveKL
    from llmrl.envs.llm.transforms.length import LengthPenalty, MaskTruncated, OverlongShaping
    from llmrl.envs.llm.transforms.log_probs import RetrieveLogProb
    from llmrl.envs.llm.transforms.policy_version import PolicyVersion
    from llmrl.envs.llm.transforms.ready_tools import BrowserTransform, MCPToolTransform, PythonInterpreter
    from llmrl.envs.llm.transforms.reward import RewardFunction, load_reward, make_rewards
    from llmrl.envs.llm.transforms.template import TemplateTransform
    from llmrl.envs.llm.transforms.thinking import AddThinkingPrompt
    from llmrl.envs.llm.transforms.tokenizer import Tokenizer
    from llmrl.envs.llm.transforms.tool_use import tool_metrics
    from llmrl.envs.llm.transforms.tools import ToolTransform
    from llmrl.envs.llm.transforms.user_turn import UserTurn
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "DataLoadingPrimer",
    "EndOfData",
    "KLComputation",
    "KLRewardTransform",
    "LengthPenalty",
    "MCPToolTransform",
    "MaskTruncated",
    "OverlongShaping",
    "PolicyVersion",
    "PythonInterpreter",
    "RetrieveKL",
    "RetrieveLogProb",
    "RewardFunction",
    "TemplateTransform",
    "Tokenizer",
    "ToolTransform",
    "UserTurn",
    "as_nested_tensor",
    "as_padded_tensor",
    "load_reward",
    "make_rewards",
    "tool_metrics",
]
