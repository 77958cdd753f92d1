"""Conversations and their text: History, chat templates, and the spans that the assistant wrote."""

from __future__ import annotations

from llmrl.data.llm.chat import History
from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.templates import ChatTemplate, Message, add_chat_template, find_template

__all__ = ["ChatCodec", "ChatTemplate", "History", "Message", "add_chat_template", "find_template"]
