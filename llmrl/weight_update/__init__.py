"""How new weights reach the engines that sample: published with a version, whole or not at all."""

from llmrl.weight_update.publisher import WeightPublisher, WeightReceiver

__all__ = ["WeightPublisher", "WeightReceiver"]
