"""New weights for the engines that sample: published with a version, whole or not at all, and proven."""

from llmrl.weight_update.groups import LazyWeight, WeightGroups, weight_groups
from llmrl.weight_update.lora import adapter_folder, merged_weights
from llmrl.weight_update.probe import SyncProbe
from llmrl.weight_update.publish import WeightReceiver, publish

__all__ = [
    "LazyWeight",
    "SyncProbe",
    "WeightGroups",
    "WeightReceiver",
    "adapter_folder",
    "merged_weights",
    "publish",
    "weight_groups",
]
