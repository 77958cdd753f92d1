"""Environments for language models: chats, datasets of prompts, and tasks with their rewards."""

from llmrl.envs.llm.chat import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.countdown import CountdownEnv, CountdownRewardParser
from llmrl.envs.llm.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
from llmrl.envs.llm.hashing import LLMHashingEnv
from llmrl.envs.llm.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
from llmrl.envs.llm.math import MATHEnv, MATHRewardParser
from llmrl.envs.llm.mlgym import MLGymWrapper, make_mlgym
from llmrl.envs.llm.task import TaskEnv
from llmrl.envs.llm.token_env import LLMEnv

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
    "TaskEnv",
    "make_gsm8k_env",
    "make_mlgym",
]
