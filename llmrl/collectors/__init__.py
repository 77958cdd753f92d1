"""Collectors run a policy in an environment and yield batches of steps; those for chats are in `collectors.llm`."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.base import DataCollectorBase
    from llmrl.collectors.collector import SyncDataCollector
    from llmrl.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector, aSyncDataCollector
    from llmrl.collectors.weight_updaters import (
        EngineUpdater,
        MultiProcessedWeightUpdater,
        RayWeightUpdater,
        VanillaWeightUpdater,
        WeightUpdaterBase,
    )
    from llmrl.envs.utils import RandomPolicy
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "DataCollectorBase",
    "EngineUpdater",
    "MultiProcessedWeightUpdater",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RandomPolicy",
    "RayWeightUpdater",
    "SyncDataCollector",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "aSyncDataCollector",
]
