"""Conversations and their text: History, chat templates, the spans that the assistant wrote, and datasets of both."""

from typing import TYPE_CHECKING

from llmrl.data.llm import rlhf
from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.llm.rollout_from_model import RolloutFromModel  # its documented path; it runs models
    from llmrl.data.llm.codec import ChatCodec
    from llmrl.data.llm.content import ContentBase
    from llmrl.data.llm.history import History
    from llmrl.data.llm.kl_controllers import AdaptiveKLController, ConstantKLController
    from llmrl.data.llm.rlhf import *  # noqa: F403
    from llmrl.data.llm.templates import ChatTemplate, Message, add_chat_template, find_template
    from llmrl.data.llm.topk import TopKRewardSelector
else:
    __getattr__, __dir__ = on_demand(__name__)

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
