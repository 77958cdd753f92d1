"""Conversations and their text: History, chat templates, and the spans that the assistant wrote."""

from __future__ import annotations

from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.content import ContentBase
from llmrl.data.llm.history import History
from llmrl.data.llm.kl_controllers import AdaptiveKLController, ConstantKLController
from llmrl.data.llm.templates import ChatTemplate, Message, add_chat_template, find_template
from llmrl.data.llm.topk import TopKRewardSelector

__all__ = [
    "AdaptiveKLController",
    "ChatCodec",
    "ChatTemplate",
    "ConstantKLController",
    "ContentBase",
    "History",
    "Message",
    "TopKRewardSelector",
    "add_chat_template",
    "find_template",
]
