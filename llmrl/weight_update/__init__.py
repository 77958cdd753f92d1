"""Weights from a trainer to engines and workers: versioned, all or nothing, and verified.

`publish` gives new weights to an engine that this process holds. A scheme carries them to workers in other processes. A
collector makes these calls for each model id and scheme of its ``weight_sync_schemes``:

    sender = scheme.create_sender()                      # in the trainer's process
    sender.set_context(collector, model_id)              # model_id: an attribute path, "env.transform[0].actor"
    sender.register_worker(i, ours)                      # per worker and model: ours, theirs = multiprocessing.Pipe();
                                                         # close `theirs` here once the worker has it
    receiver = scheme.create_receiver()                  # in worker i, which received the scheme and `theirs`
    receiver.set_context(inner)                          # the object at which model ids start
    receiver.register_model(model_id)                    # or a module
    receiver.register_worker_transport(theirs)
    receiver.receive()                                   # at each step boundary: applies new weights, and answers

    sender.update_weights(weights, worker_ids=None)      # sends; weights: module, TensorDict, mapping or None
    sender.wait()                                        # until every worker has them; `update_weights` begins with it
    sender.version, receiver.version

If ``scheme.per_worker`` is False no worker is registered: the sender finds the model in its context.
"""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand
from llmrl.weight_update.publish import WeightTarget, publish

if TYPE_CHECKING:
    from llmrl.weight_update.distributed import DistributedTransport, DistributedWeightSyncScheme
    from llmrl.weight_update.groups import LazyWeight, WeightGroups, weight_groups
    from llmrl.weight_update.lora import adapter_folder, merged_weights
    from llmrl.weight_update.probe import SyncProbe
    from llmrl.weight_update.ray_schemes import (
        RayActorTransport,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayTransport,
        RayWeightSyncScheme,
    )
    from llmrl.weight_update.rpc import RPCTransport, RPCWeightSyncScheme
    from llmrl.weight_update.schemes import (
        MultiProcessWeightSyncScheme,
        NoWeightSyncScheme,
        SharedMemWeightSyncScheme,
        WeightReceiver,
        WeightSender,
        WeightSyncScheme,
    )
    from llmrl.weight_update.target import ModelTarget
    from llmrl.weight_update.transports import MPTransport, SharedMemTransport, TransportBackend
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "LazyWeight",
    "MPTransport",
    "ModelTarget",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "SyncProbe",
    "TransportBackend",
    "WeightGroups",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncScheme",
    "WeightTarget",
    "adapter_folder",
    "merged_weights",
    "publish",
    "weight_groups",
]
