"""Weights from a trainer to vLLM, under the documented names: the updater of a collector, and the scheme."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.llm.weight_update.vllm import (
        VLLMWeightReceiver,
        VLLMWeightSender,
        VLLMWeightSyncScheme,
        vLLMUpdater,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["VLLMWeightReceiver", "VLLMWeightSender", "VLLMWeightSyncScheme", "vLLMUpdater"]
