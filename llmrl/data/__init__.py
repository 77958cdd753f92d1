"""Data: specs, replay buffers and `History`; other code for conversations is in `llmrl.data.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrl.data import maps, postprocs, replay_buffers, specs, ted
from llmrl.data.maps import *  # noqa: F403
from llmrl.data.postprocs import *  # noqa: F403
from llmrl.data.replay_buffers import *  # noqa: F403
from llmrl.data.specs import *  # noqa: F403
from llmrl.data.ted import *  # noqa: F403

if TYPE_CHECKING:
    from llmrl.data.llm import (
        AdaptiveKLController,
        ConstantKLController,
        History,
        LLMData,
        LLMInput,
        LLMOutput,
        PairwiseDataset,
        PromptData,
        PromptTensorDictTokenizer,
        RewardData,
        RolloutFromModel,
        TensorDictTokenizer,
        TokenizedDatasetLoader,
        create_infinite_iterator,
        get_dataloader,
    )

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "History",
    "LLMData",
    "LLMInput",
    "LLMOutput",
    "PairwiseDataset",
    "PromptData",
    "PromptTensorDictTokenizer",
    "RewardData",
    "RolloutFromModel",
    "TensorDictTokenizer",
    "TokenizedDatasetLoader",
    "create_infinite_iterator",
    "get_dataloader",
]
__all__ += maps.__all__
__all__ += postprocs.__all__
__all__ += replay_buffers.__all__
__all__ += specs.__all__
__all__ += ted.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmrl.data import llm  # loads transformers, which buffers and specs do not need

    return getattr(llm, name)
