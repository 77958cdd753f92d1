"""Transforms for chat environments: prompts from data, rewards, the price of length, the policy version."""

from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer, EndOfData
from llmrl.envs.llm.transforms.length import LengthPenalty, MaskTruncated, OverlongShaping
from llmrl.envs.llm.transforms.policy_version import PolicyVersion
from llmrl.envs.llm.transforms.reward import RewardFunction, load_reward

__all__ = [
    "DataLoadingPrimer",
    "EndOfData",
    "LengthPenalty",
    "MaskTruncated",
    "OverlongShaping",
    "PolicyVersion",
    "RewardFunction",
    "load_reward",
]
