"""Conversations and their text: History, chat templates, the spans that the assistant wrote, and datasets of both."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmrl.data.llm import rlhf
from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.content import ContentBase
from llmrl.data.llm.history import History
from llmrl.data.llm.kl_controllers import AdaptiveKLController, ConstantKLController
from llmrl.data.llm.rlhf import *  # noqa: F403
from llmrl.data.llm.templates import ChatTemplate, Message, add_chat_template, find_template
from llmrl.data.llm.topk import TopKRewardSelector

if TYPE_CHECKING:
    from llmrl.collectors.llm.rollout_from_model import RolloutFromModel

__all__ = [
    "AdaptiveKLController",
    "ChatCodec",
    "ChatTemplate",
    "ConstantKLController",
    "ContentBase",
    "History",
    "Message",
    "RolloutFromModel",
    "TopKRewardSelector",
    "add_chat_template",
    "find_template",
]
__all__ += rlhf.__all__


def __getattr__(name: str) -> Any:
    if name != "RolloutFromModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazy, because it runs models, which `llmrl.data` does not depend on; this is only its documented path.
    return importlib.import_module("llmrl.collectors.llm.rollout_from_model").RolloutFromModel
