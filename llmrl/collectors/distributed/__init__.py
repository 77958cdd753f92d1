"""Collectors whose workers run on other machines, and the launcher and weight updaters for them."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.collectors.distributed.collectors import (
        DistributedDataCollector,
        DistributedSyncDataCollector,
        RPCDataCollector,
    )
    from llmrl.collectors.distributed.launchers import submitit_delayed_launcher
    from llmrl.collectors.distributed.ray import RayCollector
    from llmrl.collectors.weight_updaters import DistributedWeightUpdater, RPCWeightUpdater
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "DistributedDataCollector",
    "DistributedSyncDataCollector",
    "DistributedWeightUpdater",
    "RPCDataCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "submitit_delayed_launcher",
]
