"""Environments for language models: chats, datasets of prompts, and tasks with their rewards."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.llm.chat import ChatEnv, DatasetChatEnv
    from llmrl.envs.llm.tasks.countdown import CountdownEnv, CountdownRewardParser
    from llmrl.envs.llm.tasks.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
    from llmrl.envs.llm.tasks.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
    from llmrl.envs.llm.tasks.math import MATHEnv, MATHRewardParser
    from llmrl.envs.llm.tasks.mlgym import MLGymWrapper, make_mlgym
    from llmrl.envs.llm.tasks.reasoning_gym import ReasoningGymEnv
    from llmrl.envs.llm.tasks.task import TaskEnv
    from llmrl.envs.llm.token_env import LLMEnv, LLMHashingEnv
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DatasetChatEnv",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "IFEvalEnv",
    "IFEvalScoreData",
    "IfEvalScorer",
    "LLMEnv",
    "LLMHashingEnv",
    "MATHEnv",
    "MATHRewardParser",
    "MLGymWrapper",
    "ReasoningGymEnv",
    "TaskEnv",
    "make_gsm8k_env",
    "make_mlgym",
]
