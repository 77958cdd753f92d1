"""Weights for processes of a torch.distributed.rpc group."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.distributed import rpc

from llmrl.weight_update.payload import Layout, Payload
from llmrl.weight_update.schemes import WeightSyncScheme, deliver
from llmrl.weight_update.transports import CallTransport


class RPCTransport(CallTransport):
    """Weights for the object behind a remote reference; the call applies them unless the object registered a receiver.

    collector_info   the worker, by name or as WorkerInfo; None: the reference's owner
    collector_rref   reference to the object that has the model at the model id's path
    collector_class  class of the object; not used
    """

    def __init__(
        self, collector_info: Any = None, collector_rref: Any = None, collector_class: Any = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._rref = collector_rref
        self._info = collector_rref.owner() if collector_info is None and collector_rref is not None else collector_info

    def check_connection(self) -> bool:
        return self._rref is not None

    def call(self, model_id: str, payload: Payload) -> Any:
        arguments = (self._rref, model_id, payload.version, payload.layout, payload.memory)
        return rpc.rpc_async(self._info, _deliver, args=arguments, timeout=0)  # `result` has the deadline

    def result(self, call: Any, seconds: float) -> str:
        done = threading.Event()
        call.add_done_callback(lambda _: done.set())
        if not done.wait(seconds):
            raise TimeoutError
        return call.value()


class RPCWeightSyncScheme(WeightSyncScheme):
    """Weights by calls of torch.distributed.rpc. ``pipe_or_context`` is a remote reference or a tuple (worker,
    reference, class); None in a worker whose receiver polls.
    """

    def create_transport(self, pipe_or_context: Any) -> RPCTransport:
        context = pipe_or_context if isinstance(pipe_or_context, tuple) else (None, pipe_or_context)
        return RPCTransport(*context, timeout=self.timeout, strategy=self.strategy)


def _deliver(rref: Any, model_id: str, version: int, layout: Layout, memory: Tensor) -> str:
    return deliver(rref.local_value(), model_id, model_id, Payload(version, layout, memory))
