"""Weights from a trainer to vLLM, under the documented names: the updater of a collector, and the scheme."""

from llmrl.collectors.llm.weight_update.vllm import (
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    vLLMUpdater,
)

__all__ = ["VLLMWeightReceiver", "VLLMWeightSender", "VLLMWeightSyncScheme", "vLLMUpdater"]
