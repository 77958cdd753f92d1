"""Environments for language models: chats, datasets of prompts, and tasks with their rewards."""

from llmrl.envs.llm.chat import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.countdown import CountdownEnv, CountdownRewardParser
from llmrl.envs.llm.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
from llmrl.envs.llm.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
from llmrl.envs.llm.math import MATHEnv, MATHRewardParser
from llmrl.envs.llm.task import TaskEnv

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
    "MATHEnv",
    "MATHRewardParser",
    "TaskEnv",
    "make_gsm8k_env",
]
