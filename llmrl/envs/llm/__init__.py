"""Environments for language models: chats, datasets of prompts, GSM8K, and the transforms around them."""

from llmrl.envs.llm.chat import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.gsm8k import GSM8KEnv, GSM8KRewardParser

__all__ = ["ChatEnv", "DatasetChatEnv", "GSM8KEnv", "GSM8KRewardParser"]
