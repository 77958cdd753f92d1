"""Transforms for chat environments: prompts from data, rewards, the price of length, the policy version."""

from llmrl.envs.llm.transforms.browser import BrowserTransform
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer, EndOfData
from llmrl.envs.llm.transforms.length import LengthPenalty, MaskTruncated, OverlongShaping
from llmrl.envs.llm.transforms.mcp_tools import MCPToolTransform
from llmrl.envs.llm.transforms.policy_version import PolicyVersion
from llmrl.envs.llm.transforms.python import PythonInterpreter
from llmrl.envs.llm.transforms.reward import RewardFunction, load_reward
from llmrl.envs.llm.transforms.reward_list import make_rewards
from llmrl.envs.llm.transforms.tool_use import tool_metrics
from llmrl.envs.llm.transforms.tools import ToolTransform

__all__ = [
    "BrowserTransform",
    "DataLoadingPrimer",
    "EndOfData",
    "LengthPenalty",
    "MCPToolTransform",
    "MaskTruncated",
    "OverlongShaping",
    "PolicyVersion",
    "PythonInterpreter",
    "RewardFunction",
    "ToolTransform",
    "load_reward",
    "make_rewards",
    "tool_metrics",
]
