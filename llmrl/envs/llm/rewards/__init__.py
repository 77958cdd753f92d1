"""Rewards that need more than a line: a language model as judge, a reward model, tests that code must pass.

Each is called as a plain reward function is: give it to `RewardFunction`, or name it in a list of rewards.
"""

from llmrl.envs.llm.rewards.code import CodeReward
from llmrl.envs.llm.rewards.judge import JudgeReward
from llmrl.envs.llm.rewards.model import RewardModelScorer

__all__ = ["CodeReward", "JudgeReward", "RewardModelScorer"]
