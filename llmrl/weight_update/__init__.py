"""How new weights reach the engines that sample: published with a version, whole or not at all, and proven."""

from llmrl.weight_update.groups import LazyWeight, WeightGroups, weight_groups
from llmrl.weight_update.lora import adapter_folder, merged_weights
from llmrl.weight_update.probe import SyncProbe
from llmrl.weight_update.publisher import WeightPublisher, WeightReceiver

__all__ = [
    "LazyWeight",
    "SyncProbe",
    "WeightGroups",
    "WeightPublisher",
    "WeightReceiver",
    "adapter_folder",
    "merged_weights",
    "weight_groups",
]
