"""Built-in reward functions: a language model as judge, a reward model, tests that code must pass.

Each is callable like a plain reward function: pass it to `RewardFunction`, or name it in a list of rewards.
"""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.llm.rewards.code import CodeReward
    from llmrl.envs.llm.rewards.judge import JudgeReward
    from llmrl.envs.llm.rewards.model import RewardModelScorer
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["CodeReward", "JudgeReward", "RewardModelScorer"]
