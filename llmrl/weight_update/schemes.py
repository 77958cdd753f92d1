"""Weight synchronisation between a trainer and its workers: schemes, and the senders and receivers that they create."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.weight_update.groups import WeightGroups
from llmrl.weight_update.payload import Payload, Slots, pack
from llmrl.weight_update.publish import as_weights, publish
from llmrl.weight_update.target import ModelTarget, resolve
from llmrl.weight_update.transports import (
    CallTransport,
    DirectTransport,
    MPTransport,
    PipeTransport,
    SharedMemTransport,
    TransportBackend,
)

_RECEIVERS = "_llmrl_weight_receivers"  # attribute of a context: its receivers, {model id: receiver}
Strategy = Literal["state_dict", "tensordict"]
# (model id, weights, version, transports) -> the one payload of all workers
Packer = Callable[[str, Mapping[str, Tensor], int, Collection[TransportBackend]], Payload]
Context = Callable[[], Any]  # returns the object, or None if it was garbage-collected


class WeightSyncScheme(ABC):
    """The way of one model's weights to its workers: creates the sender, a receiver per worker, and the transports.

    A scheme holds only settings, so it can be sent to every worker's process.

    strategy    the form in which a receiver reads weights: flat as a "state_dict", or nested as a "tensordict"
    timeout     seconds within which a worker must take weights
    per_worker  False if the sender finds its receiver itself, and no worker is registered
    """

    per_worker = True
    sync = False  # updates return when the workers have answered
    adopts = False  # receivers' parameters become views of the received memory

    def __init__(self, strategy: Strategy = "state_dict", *, timeout: float = 10.0) -> None:
        if strategy not in ("state_dict", "tensordict"):
            raise ConfigError(f"{type(self).__name__}: strategy is 'state_dict' or 'tensordict': got {strategy!r}.")
        if not timeout > 0:
            raise ConfigError(f"{type(self).__name__}: timeout must be positive: got {timeout}.")
        self.strategy, self.timeout = strategy, timeout

    @abstractmethod
    def create_transport(self, pipe_or_context: Any) -> TransportBackend:
        """The connection to one worker, or the worker's end of it."""

    def create_sender(self) -> WeightSender:
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        return WeightReceiver(self)

    def create_packer(self) -> Packer:
        """The function that packs weights into the one payload for all workers of a sender."""
        return lambda model_id, weights, version, transports: pack(weights, version)

    def prepare_weights(self, weights: Any, model_id: str, strategy: str, context: Any = None) -> Mapping[str, Tensor]:
        """Named tensors of a module (adapters are merged in copies), a TensorDict, a mapping, groups, or the model at a
        path in ``context`` (None: at ``model_id``).
        """
        if weights is None or isinstance(weights, str):
            if context is None:
                raise ConfigError(
                    f"{type(self).__name__}: weights of {weights or model_id!r} need a model or a context to find it "
                    "in: give weights, or call register_model or set_context."
                )
            weights = resolve(context, weights or model_id)
        weights = as_weights(weights)
        if isinstance(weights, WeightGroups):
            weights = weights.built()
        if not isinstance(weights, Mapping):
            raise ConfigError(
                f"{type(self).__name__}: weights are a module, a TensorDict or named tensors: got "
                f"{type(weights).__name__}."
            )
        return weights


class WeightSender:
    """The trainer's side of one model: sends each version to all workers, and collects their answers.

    `update_weights` returns when the weights are sent, and they may change from then on. The next call, or `wait`,
    waits for the workers' answers.

    >>> from multiprocessing import Pipe
    >>> scheme, (ours, theirs) = MultiProcessWeightSyncScheme(), Pipe()
    >>> sender, receiver, policy = scheme.create_sender(), scheme.create_receiver(), nn.Linear(2, 1)
    >>> sender.register_worker(0, ours)
    >>> receiver.register_model(policy)
    >>> receiver.register_worker_transport(theirs)
    >>> sender.update_weights({"weight": 3 * torch.ones(1, 2), "bias": torch.zeros(1)})
    >>> receiver.receive(), policy.weight.tolist()
    (1, [[3.0, 3.0]])
    >>> sender.wait()
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self.scheme, self.model_id = scheme, "policy"
        self.version = 0  # of the last weights sent
        self._context: Context = lambda: None
        self._model: nn.Module | None = None
        self._transports: dict[Hashable, TransportBackend] = {}
        self._refusals: list[Exception] = []
        self._pack = scheme.create_packer()
        self._lock = threading.Lock()

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Sets the object that holds the model at the attribute path ``model_id``; keeps a weak reference to it."""
        self._context = _weakly(context)
        self.model_id = model_id or self.model_id

    def register_model(self, model: nn.Module) -> None:
        """Sets the model whose weights are sent when none are given, and that all weights must fit."""
        self._model = model

    def register_worker(self, worker_idx: Hashable, pipe_or_context: Any) -> None:
        """Connects a worker. A second call replaces its connection, or does nothing if the connection is the same."""
        old = self._transports.get(worker_idx)
        if old is None or pipe_or_context is not getattr(old, "registered_with", None):
            transport = self.scheme.create_transport(pipe_or_context)
            transport.registered_with = pipe_or_context
            transport.peer = f"worker {worker_idx!r} (model {self.model_id!r})"
            transport.sent = transport.answered = self.version  # it owes no answers for earlier versions
            self._transports[worker_idx] = transport

    def unregister_worker(self, worker_idx: Hashable) -> None:
        """Disconnects a worker: nothing is sent to it any more, and no answer is expected."""
        self._transports.pop(worker_idx, None)

    def update_weights(self, weights: Any = None, *, worker_ids: Collection[Hashable] | None = None) -> None:
        """Sends weights to the workers (None: all of them) under the next version.

        Reads   a module, a TensorDict, named tensors, the path of a model in the context; None: the registered model
        Raises  WeightSyncError if they do not fit the registered model, or a worker refused the previous version;
                DeadlineError, WorkerError, naming a worker that has not taken the previous version: nothing is sent
        """
        with self._lock:
            ids = list(self._transports if worker_ids is None else worker_ids)
            if unknown := [worker for worker in ids if worker not in self._transports]:
                raise ConfigError(
                    f"WeightSender: {unknown} are not registered: workers are {list(self._transports)}; call "
                    "register_worker."
                )
            named = self.prepare(weights)
            # A transport has one version in flight, and a block of shared memory is free only when no worker reads it.
            # Nothing is packed before the wait, so an error here leaves the version unchanged.
            self._wait(self.scheme.timeout)
            transports = list(self._transports.values())
            payload = self._pack(self.model_id, named, self.version + 1, transports)
            self.version = payload.version
            for worker in ids:
                self._transports[worker].send_weights(self.model_id, payload)
            if self.scheme.sync:
                self._wait(self.scheme.timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until every worker has applied the weights sent to it. Raises the errors of `update_weights`."""
        with self._lock:
            self._wait(self.scheme.timeout if timeout is None else timeout)

    def prepare(self, weights: Any) -> Mapping[str, Tensor]:
        """Named tensors that fit the model, if it is known."""
        context = self._context()
        model = self._model
        if model is None and context is not None:
            with suppress(ConfigError):  # perhaps only the workers have it; if it is needed, prepare_weights raises
                model = resolve(context, self.model_id)
        named = self.scheme.prepare_weights(
            model if weights is None else weights, self.model_id, self.scheme.strategy, context
        )
        if isinstance(model, nn.Module) and weights is not None and weights is not model:
            own = ModelTarget(model).check(named)
            named = {name: tensor for name, tensor in named.items() if name in own}
        return named

    @property
    def pipes(self) -> list[Any]:
        """The pipes on which answers are expected."""
        transports = [transport for transport in self._transports.values() if transport.answered < transport.sent]
        return [t.pipe for t in transports if isinstance(t, PipeTransport) and not t.pipe.closed]

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        problems: list[Exception] = []
        for transport in self._transports.values():
            try:
                transport.wait(deadline)
            except WeightSyncError as refusal:
                self._refusals.append(refusal)  # an answer arrives only once: kept while another worker is late
            except Exception as error:
                problems.append(error)  # the loop continues: one failure must not hide the other workers' answers
        if not problems:
            problems, self._refusals = self._refusals, []
        if problems:
            others = "".join(f"\nAlso: {problem}" for problem in problems[1:])
            raise type(problems[0])(f"{problems[0]}{others}") from problems[0].__cause__


class WeightReceiver:
    """A worker's side of one model. The worker calls `receive` between steps, when no other code uses the model."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self.scheme, self.model_id = scheme, "policy"
        self._context: Context = lambda: None
        self._path: str | None = None
        self._target: ModelTarget | None = None
        self._transport: TransportBackend = DirectTransport()

    @property
    def version(self) -> int:
        """The version of the model's weights; 0 before the first update."""
        return 0 if self._target is None else self._target.version

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Sets the object at which model paths start (weakly referenced); ``model_id`` is that of the sender."""
        self._context, self.model_id = _weakly(context), model_id or self.model_id

    def register_model(self, model: nn.Module | TensorDictBase | Mapping[str, Tensor] | str) -> None:
        """Sets the target: a model, named tensors, or an attribute path in the context. The default is the model at the
        sender's model id.
        """
        self._path = model if isinstance(model, str) else None
        self._target = None if isinstance(model, str) else ModelTarget(model, adopts=self.scheme.adopts)

    def register_worker_transport(self, pipe: Any) -> None:
        """Sets this worker's end of the connection, or a transport. If weights arrive by calls into this process,
        ``pipe`` is None, and `set_context` must have been called with the object that receives them.
        """
        self._transport = pipe if isinstance(pipe, TransportBackend) else self.scheme.create_transport(pipe)
        if isinstance(self._transport, CallTransport):
            if (context := self._context()) is None:
                raise ConfigError("WeightReceiver: a context must be set before its transport is registered.")
            self.attach(context)

    def attach(self, context: Any) -> None:
        """Makes calls that deliver weights to ``context`` pass them to this receiver from now on."""
        vars(context).setdefault(_RECEIVERS, {})[self.model_id] = self

    def receive(self, timeout: float = 0.0) -> int | None:
        """Applies weights that have arrived, and answers the sender. Returns their version, or None if none arrived or
        they were refused; the answer says why.

        Raises  WorkerError if the sender has ended
        """
        if (received := self._transport.receive(timeout)) is None:
            return None
        model_id, payload = received
        return payload.version if self._apply(payload.weights, payload.version, model_id) is None else None

    def apply_weights(self, weights: Any) -> None:
        """Applies weights that the caller read from the transport, and answers the sender. Raises ConfigError without
        a model, WeightSyncError if they do not fit it.
        """
        pending = self._transport.pending
        version = self.version + 1 if pending is None else pending.version
        if (problem := self._apply(weights, version)) is not None:
            raise problem

    def _apply(self, weights: Any, version: int, model_id: str | None = None) -> Exception | None:
        """Applies weights and answers the sender; returns why they were refused."""
        problem = None
        try:
            self.update_weights(weights, version=version, model_id=model_id)
        except Exception as error:
            problem = error
        # Outside the try block: a failure to answer is not a refusal.
        self._transport.answer("" if problem is None else f"{type(problem).__name__}: {problem}")
        return problem

    def update_weights(self, weights: Any, *, version: int, model_id: str | None = None) -> None:
        """Writes weights, all or nothing, under a version that must increase."""
        if self._target is None:
            path, context = self._path or model_id, self._context()
            if path is None or context is None:
                raise ConfigError(
                    f"WeightReceiver: a model must be registered to apply weights of {model_id!r}: call "
                    "register_model, or set_context with the object that holds it."
                )
            self.register_model(resolve(context, path))
        publish(weights, self._target, version)


def deliver(context: Any, model_id: str, path: str, payload: Payload) -> str:
    """Runs in the process of ``context``: passes weights to its receiver of that model id, which applies them when it
    polls. Without a receiver, applies them now to the model at ``path``. Returns a problem or "".
    """
    receivers = vars(context).setdefault(_RECEIVERS, {})
    receiver = receivers.get(model_id)
    if receiver is not None and isinstance(receiver._transport, CallTransport):
        return receiver._transport.take(model_id, payload)
    try:
        if receiver is None:
            receiver = WeightReceiver(NoWeightSyncScheme())
            receiver.register_model(resolve(context, path))
            receivers[model_id] = receiver  # kept for its version, which must grow
        receiver.update_weights(payload.weights, version=payload.version)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights through one pipe per worker, copied into the worker's model.

    ``pipe_or_context`` is one end of a duplex `multiprocessing.Pipe` that carries nothing else.
    """

    def create_transport(self, pipe_or_context: Any) -> TransportBackend:
        return MPTransport(pipe_or_context, self.timeout, strategy=self.strategy)


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights in blocks of shared memory, written once for all workers of this machine. The workers' parameters become
    views of a block, so workers must not change them. One pipe per worker carries the versions.

    policy_weights  {model id: TensorDict}, as in ``register_shared_weights``
    auto_register   False: only registered model ids can be sent
    """

    adopts = True

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        strategy: Strategy = "tensordict",
        auto_register: bool = True,
        *,
        timeout: float = 10.0,
    ) -> None:
        super().__init__(strategy, timeout=timeout)
        self.policy_weights = dict(policy_weights or {})
        self.auto_register = auto_register

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Declares a model's weights: every update also writes them, for other processes that share them."""
        SharedMemTransport(self.policy_weights).register_weights(model_id, weights)
        self.policy_weights[model_id] = weights

    def create_transport(self, pipe_or_context: Any) -> SharedMemTransport:
        return SharedMemTransport(
            self.policy_weights, self.auto_register, pipe=pipe_or_context, timeout=self.timeout, strategy=self.strategy
        )

    def create_packer(self) -> Packer:
        return Slots(self.policy_weights, self.auto_register).write


class NoWeightSyncScheme(WeightSyncScheme):
    """Accepts weights and sends nothing: for a model that workers do not use, or share with the trainer."""

    def __init__(self) -> None:
        super().__init__()

    def create_transport(self, pipe_or_context: Any = None) -> TransportBackend:
        return DirectTransport()

    def create_packer(self) -> Packer:
        return lambda model_id, weights, version, transports: Payload(version, {}, torch.empty(0))


def _weakly(context: Any) -> Context:
    try:
        return weakref.ref(context)
    except TypeError:  # the type does not support weak references
        return lambda: context
