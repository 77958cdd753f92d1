"""Weights from a trainer into vLLM, under the documented names: the updater of a collector, and the scheme."""

from llmrl.collectors.llm.weight_update.scheme import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme
from llmrl.collectors.llm.weight_update.vllm import vLLMUpdater

__all__ = ["VLLMWeightReceiver", "VLLMWeightSender", "VLLMWeightSyncScheme", "vLLMUpdater"]
