"""llmrl: post-training for language models.

The names below are those of a first loop. Each is loaded when it is first used, from the sub-package that documents it;
``import llmrl`` itself loads nothing.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from llmrl.collectors.llm import LLMCollector
    from llmrl.data import LazyStackStorage, ReplayBuffer
    from llmrl.data.llm import History
    from llmrl.envs.llm import ChatEnv, DatasetChatEnv
    from llmrl.envs.llm.transforms import RewardFunction, ToolTransform
    from llmrl.modules.llm import TransformersWrapper, vLLMWrapper
    from llmrl.objectives.llm import DPOLoss, GRPOLoss, MCAdvantage, SFTLoss

__version__ = "0.1.0"

_HOMES = {
    "llmrl.collectors.llm": ("LLMCollector",),
    "llmrl.data": ("LazyStackStorage", "ReplayBuffer"),
    "llmrl.data.llm": ("History",),
    "llmrl.envs.llm": ("ChatEnv", "DatasetChatEnv"),
    "llmrl.envs.llm.transforms": ("RewardFunction", "ToolTransform"),
    "llmrl.modules.llm": ("TransformersWrapper", "vLLMWrapper"),
    "llmrl.objectives.llm": ("DPOLoss", "GRPOLoss", "MCAdvantage", "SFTLoss"),
}
__all__ = [
    "ChatEnv",
    "DPOLoss",
    "DatasetChatEnv",
    "GRPOLoss",
    "History",
    "LLMCollector",
    "LazyStackStorage",
    "MCAdvantage",
    "ReplayBuffer",
    "RewardFunction",
    "SFTLoss",
    "ToolTransform",
    "TransformersWrapper",
    "vLLMWrapper",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(_import_module(home), name)
    raise AttributeError(f"module 'llmrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
