"""Losses. The language-model ones are in `llmrl.objectives.llm`; every loss is a `LossModule`."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.objectives.base import LossModule, merge_outputs, total_loss
    from llmrl.objectives.metric import Metric
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["LossModule", "Metric", "merge_outputs", "total_loss"]
