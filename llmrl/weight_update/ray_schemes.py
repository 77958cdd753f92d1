"""Weights for Ray actors: put into the object store once, then read by every actor from its node's memory."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from llmrl.errors import ConfigError
from llmrl.optional import require
from llmrl.weight_update.payload import Layout, Payload
from llmrl.weight_update.schemes import Strategy, WeightReceiver, WeightSender, WeightSyncScheme, deliver
from llmrl.weight_update.target import resolve
from llmrl.weight_update.transports import CallTransport


class RayTransport(CallTransport):
    """Weights for one Ray actor, of any class.

    An actor that runs one method at a time applies them between two methods. An actor that works in a thread registers
    a receiver, which that thread polls.

    path  attribute path of the model in the actor; None: the model id
    """

    def __init__(self, remote_collector: Any = None, *, path: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._actor, self._path = remote_collector, path

    def check_connection(self) -> bool:
        return self._actor is not None

    def call(self, model_id: str, payload: Payload) -> Any:
        if payload.stored is None:  # the first actor's transport stores it, the others send the reference
            payload.stored = require("ray", extra="ray", used_by="RayTransport").put(payload.memory.numpy())
        path = model_id if self._path is None else self._path
        arguments = (model_id, path, payload.version, payload.layout, payload.stored)
        return self._actor.__ray_call__.remote(_deliver, *arguments)

    def result(self, call: Any, seconds: float) -> str:
        ray = require("ray", extra="ray", used_by="RayTransport")
        return ray.get(call, timeout=seconds)  # GetTimeoutError is a TimeoutError


class RayActorTransport(RayTransport):
    """Weights for a model that a Ray actor holds and that belongs to no particular worker.

    update_method  "tensordict" or "state_dict": the form in which weights are read; both are sent as named tensors
    """

    def __init__(self, actor_ref: Any = None, update_method: Strategy = "tensordict", **options: Any) -> None:
        super().__init__(actor_ref, strategy=update_method, **options)


class RayWeightSyncScheme(WeightSyncScheme):
    """Weights through Ray's object store. ``pipe_or_context`` is an actor that has the model at the model id's path,
    or None in an actor that registers a receiver.
    """

    def create_transport(self, pipe_or_context: Any) -> RayTransport:
        return RayTransport(pipe_or_context, timeout=self.timeout, strategy=self.strategy)


class RayModuleTransformScheme(WeightSyncScheme):
    """Weights for a module in a transform that a Ray actor hosts; the actor belongs to no particular worker.

    The model id is the path, in the sender's context, of the actor or of an object whose ``actor`` it is.

    module  the path of the module in the actor; "": the actor itself
    """

    per_worker = False

    def __init__(self, strategy: Strategy = "tensordict", *, module: str = "module", timeout: float = 10.0) -> None:
        super().__init__(strategy, timeout=timeout)
        self.module = module

    def create_transport(self, pipe_or_context: Any) -> RayActorTransport:
        return RayActorTransport(pipe_or_context, self.strategy, path=self.module, timeout=self.timeout)

    def create_sender(self) -> RayModuleTransformSender:
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        return RayModuleTransformReceiver(self)


class RayModuleTransformSender(WeightSender):
    """Sends to the actor that it finds in its context; no worker has to be registered."""

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        super().set_context(context, model_id)
        found = resolve(context, model_id or "")
        actor = found if hasattr(found, "__ray_call__") else getattr(found, "actor", None)
        if not hasattr(actor, "__ray_call__"):
            raise ConfigError(
                f"RayModuleTransformSender: {model_id or 'the context'!r} must be a Ray actor, or have one as `actor`: "
                f"got {type(found).__name__}."
            )
        self.register_worker("actor", actor)


class RayModuleTransformReceiver(WeightReceiver):
    """The actor's side, for an actor that applies weights in its own thread; other actors need no receiver."""


def _deliver(actor: Any, model_id: str, path: str, version: int, layout: Layout, memory: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the store's memory is read-only; it is only read
        weights = torch.from_numpy(memory)
    return deliver(actor, model_id, path, Payload(version, layout, weights))
