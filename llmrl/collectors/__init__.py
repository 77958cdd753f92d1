"""Collectors run a policy in an environment and hand out what happened; those for chats are in `collectors.llm`."""

from llmrl.collectors.weight_updaters import (
    EngineUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from llmrl.envs.utils import RandomPolicy

__all__ = [
    "EngineUpdater",
    "MultiProcessedWeightUpdater",
    "RandomPolicy",
    "RayWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
