"""Datasets of preferences and prompts: tokenised once into memory-mapped files, and read in batches."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.llm.rlhf.containers import LLMData, LLMInput, LLMOutput
    from llmrl.data.llm.rlhf.dataloader import create_infinite_iterator, get_dataloader
    from llmrl.data.llm.rlhf.datasets import PairwiseDataset, PromptData, RewardData
    from llmrl.data.llm.rlhf.tokenizing import PromptTensorDictTokenizer, TensorDictTokenizer, TokenizedDatasetLoader
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "LLMData",
    "LLMInput",
    "LLMOutput",
    "PairwiseDataset",
    "PromptData",
    "PromptTensorDictTokenizer",
    "RewardData",
    "TensorDictTokenizer",
    "TokenizedDatasetLoader",
    "create_infinite_iterator",
    "get_dataloader",
]
