"""Data: specs, replay buffers and `History`; other code for conversations is in `llmrl.data.llm`."""

from typing import TYPE_CHECKING

from llmrl.data import maps, replay_buffers, specs
from llmrl.lazy import on_demand

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
    from llmrl.data.maps import *  # noqa: F403
    from llmrl.data.postprocs import DensifyReward, MultiStep
    from llmrl.data.replay_buffers import *  # noqa: F403
    from llmrl.data.replay_buffers.checkpointers import *  # noqa: F403
    from llmrl.data.replay_buffers.samplers import *  # noqa: F403
    from llmrl.data.replay_buffers.storages import *  # noqa: F403
    from llmrl.data.replay_buffers.writers import *  # noqa: F403
    from llmrl.data.specs import *  # noqa: F403
    from llmrl.data.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "DensifyReward",
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "History",
    "LLMData",
    "LLMInput",
    "LLMOutput",
    "MultiStep",
    "Nested2TED",
    "PairwiseDataset",
    "PromptData",
    "PromptTensorDictTokenizer",
    "RewardData",
    "RolloutFromModel",
    "TED2Flat",
    "TED2Nested",
    "TensorDictTokenizer",
    "TokenizedDatasetLoader",
    "create_infinite_iterator",
    "get_dataloader",
]
__all__ += maps.__all__
__all__ += replay_buffers.__all__
__all__ += specs.__all__
