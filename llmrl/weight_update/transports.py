"""Transports: send weights to one worker, and carry the worker's answer back.

A transport has one version in flight at a time: `send_weights` sends it and returns, `wait` waits for the worker's
answer. The worker uses the same class with the other end of the pipe.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler, so that they are sent as shared memory
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.errors import ConfigError, DeadlineError, WeightSyncError, WorkerError
from llmrl.weight_update.payload import Payload, Slots, pack
from llmrl.weight_update.publish import named_tensors

_MARK = "llmrl-weights"
_CHUNK = 1 << 20  # bytes of one message: the reader of a pipe allocates memory for a whole message
_ANSWER_S = 3600.0  # longest wait of a call in the worker; the sender gives up earlier
_SMALL = 1 << 14  # bytes that fit into an empty pipe's buffer


class TransportBackend(ABC):
    """One worker's connection. A sender calls `send_weights` and `wait`, a receiver `receive` and `answer`.

    peer      name of the other side, for messages
    strategy  the form in which `receive_weights` returns weights: "state_dict" (flat, dotted names) or "tensordict"
    sent      the last version sent; ``answered``: the last version that the worker has answered
    """

    def __init__(self, *, timeout: float = 10.0, strategy: str = "state_dict") -> None:
        self.timeout, self.strategy, self.peer = timeout, strategy, "worker"
        self.sent = self.answered = 0
        self.pending: Payload | None = None  # received, but not answered yet

    @abstractmethod
    def receive(self, timeout: float) -> tuple[str, Payload] | None:
        """Worker's side: returns model id and weights, or None if none arrived within ``timeout`` seconds."""

    @abstractmethod
    def answer(self, problem: str = "") -> None:
        """Worker's side: tells the sender that ``pending`` was applied, or why it was not."""

    @abstractmethod
    def send_weights(self, model_id: str, weights: Any) -> None:
        """Sends weights: a `Payload`, which has a version, or named tensors, under the next version."""

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Waits until the worker has applied the weights.

        Raises  WeightSyncError if it refused them, DeadlineError at ``deadline`` (of `time.monotonic`), WorkerError
                if it has ended
        """

    def check_connection(self) -> bool:
        """True if weights can be sent or received."""
        return True

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """`receive` with the weights in the form of ``strategy``: views of memory that does not change before
        `answer`.
        """
        if (received := self.receive(timeout)) is None:
            return None
        weights: Any = received[1].weights
        return received[0], TensorDict(weights).unflatten_keys(".") if self.strategy == "tensordict" else weights


class DirectTransport(TransportBackend):
    """Base of transports in this process: the receiver has the weights once `send_weights` returns. Does nothing."""

    def _do_nothing(self, *arguments: Any) -> None:
        pass

    send_weights = wait = receive = answer = _do_nothing


class RemoteTransport(TransportBackend):
    """Base of the transports to other processes: each `send_weights` is followed by one answer, read by `wait`."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        payload = weights if isinstance(weights, Payload) else self.pack(model_id, named_tensors(weights))
        self.send(model_id, payload)
        self.sent = payload.version

    def pack(self, model_id: str, weights: Mapping[str, Tensor]) -> Payload:
        return pack(weights, self.sent + 1)

    @abstractmethod
    def send(self, model_id: str, payload: Payload) -> None:
        """Sends the payload without waiting for the worker."""

    @abstractmethod
    def answer_by(self, deadline: float) -> tuple[int, str]:
        """The worker's next answer: a version, and a problem or "". Raises TimeoutError at the deadline (of
        `time.monotonic`), another error if the worker has ended.
        """

    def wait(self, deadline: float) -> None:
        while self.answered < self.sent:  # a connection registered again may still carry answers to earlier versions
            try:
                self.answered, problem = self.answer_by(deadline)
            except TimeoutError:
                raise DeadlineError(
                    f"{self.peer} must take version {self.sent} of the weights in time: it has not answered, its "
                    f"version is {self.answered}. Its receiver must poll (`receiver.receive()`); remove a worker that "
                    "has ended with `sender.unregister_worker`."
                ) from None
            except Exception as error:
                raise WorkerError(
                    f"{self.peer} must be running to take version {self.sent} of the weights: its process ended or "
                    f"closed the connection ({type(error).__name__}). Start it again and register it, or "
                    "`sender.unregister_worker`."
                ) from error
            if problem:
                raise WeightSyncError(f"{self.peer} refused version {self.answered} and keeps its weights: {problem}")


class PipeTransport(RemoteTransport):
    """Base of the transports over a duplex `multiprocessing.Pipe`, which must not carry other messages."""

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(**options)
        self.pipe = pipe
        if pipe is not None:
            self.register_pipe(pipe)

    def register_pipe(self, pipe: Any) -> None:
        """Sets this side's end of the pipe."""
        if not (getattr(pipe, "readable", False) and getattr(pipe, "writable", False)):
            raise ConfigError(
                f"{type(self).__name__}: needs one end of a duplex multiprocessing.Pipe(): got {type(pipe).__name__}."
            )
        self.pipe = pipe

    def check_connection(self) -> bool:
        return self.pipe is not None and not self.pipe.closed

    def post(self, header: bytes, memory: Tensor | None = None) -> None:
        """Writes a message; in a thread if the write could block until the worker reads."""

        def write() -> None:
            with contextlib.suppress(OSError):  # `wait` reports the closed pipe
                self.pipe.send_bytes(header)
                if memory is not None:
                    data = memoryview(memory.numpy())
                    for start in range(0, len(data), _CHUNK):
                        self.pipe.send_bytes(data[start : start + _CHUNK])

        if len(header) + (0 if memory is None else memory.numel()) <= _SMALL:
            write()
        else:
            threading.Thread(target=write, name="llmrl-weights", daemon=True).start()

    def answer_by(self, deadline: float) -> tuple[int, str]:
        if self.pipe.closed:
            raise EOFError
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return pickle.loads(self.pipe.recv_bytes())

    def answer(self, problem: str = "") -> None:
        if self.pending is not None:
            version, self.pending = self.pending.version, None
            with contextlib.suppress(OSError):  # the next `receive` reports the closed pipe
                self.pipe.send_bytes(pickle.dumps((version, problem)))

    def receive(self, timeout: float) -> tuple[str, Payload] | None:
        try:
            if self.pipe.closed:
                raise EOFError
            if not self.pipe.poll(timeout):
                return None
            mark, model_id, *parts = pickle.loads(self.pipe.recv_bytes())
            if mark != _MARK:
                raise ValueError(mark)
            self.pending = self.read(*parts)
        except (EOFError, ConnectionError) as error:
            raise WorkerError(
                f"WeightReceiver: the sender must stay until its workers are done: it ended or closed the pipe "
                f"({type(error).__name__})."
            ) from error
        except (ValueError, TypeError, pickle.UnpicklingError) as error:
            raise WeightSyncError(
                "WeightReceiver: the pipe must carry nothing but this sender's weights: got another message. Give "
                "each model and worker a pipe of its own."
            ) from error
        return model_id, self.pending

    @abstractmethod
    def read(self, *parts: Any) -> Payload:
        """The weights of a message, given the fields of its header."""


class MPTransport(PipeTransport):
    """Weights are sent through the pipe itself, without shared memory."""

    def __init__(self, pipe_connection: Any, timeout: float = 10.0, *, strategy: str = "state_dict") -> None:
        super().__init__(pipe_connection, timeout=timeout, strategy=strategy)
        self._received = Payload(0, {}, torch.empty(0, dtype=torch.uint8))  # its memory is used again for each version

    def send(self, model_id: str, payload: Payload) -> None:
        header = pickle.dumps((_MARK, model_id, payload.version, payload.layout, payload.memory.numel()))
        self.post(header, payload.memory)

    def read(self, version: int, layout: Any, size: int) -> Payload:
        if layout != self._received.layout:
            self._received = Payload(version, layout, torch.empty(size, dtype=torch.uint8))
        data, start, deadline = memoryview(self._received.memory.numpy()), 0, time.monotonic() + self.timeout
        while start < size:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(
                    f"WeightReceiver: version {version} must arrive within {self.timeout} s: got {start} of {size} "
                    "bytes; the sender is stopped or the machine is busy."
                )
            start += self.pipe.recv_bytes_into(data[start:])
        self._received.version = version
        return self._received


class SharedMemTransport(PipeTransport):
    """Weights are in blocks of shared memory, each for all workers; the pipe carries the number of the block.

    The worker's parameters become views of the block. It is reused after the worker has switched to the next one.

    policy_weights  {model id: TensorDict} to keep up to date as well, see ``register_weights``
    auto_register   False: only model ids that were registered can be sent
    """

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        auto_register: bool = True,
        *,
        pipe: Any = None,
        timeout: float = 10.0,
        strategy: str = "tensordict",
    ) -> None:
        super().__init__(pipe, timeout=timeout, strategy=strategy)
        self.registered = dict(policy_weights or {})
        self._own = Slots(self.registered, auto_register)
        self._held: int | None = None  # the block that the worker reads
        self._offered: int | None = None  # the block that was sent to it and is not answered yet
        self._known: dict[int, Payload] = {}  # blocks that both sides have

    @property
    def busy(self) -> set[int]:
        """Numbers of the blocks that the worker may be reading."""
        return {number for number in (self._held, self._offered) if number is not None}

    def register_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Declares the weights of a model id: every update also writes them, for other processes that share them and
        tolerate reads during a write. Receivers never see a mixture of versions.
        """
        if not isinstance(weights, TensorDictBase):
            raise ConfigError(f"SharedMemTransport: weights must be a TensorDict: got {type(weights).__name__}.")
        self.registered[model_id] = weights

    def pack(self, model_id: str, weights: Mapping[str, Tensor]) -> Payload:
        self.wait(time.monotonic() + self.timeout)  # afterwards the worker uses at most one block
        return self._own.write(model_id, weights, self.sent + 1, [self])

    def send(self, model_id: str, payload: Payload) -> None:
        number = self._offered = payload.slot
        # The block itself is sent once, and stays mapped in the worker.
        content = None if self._known.get(number) is payload else (payload.layout, payload.memory)
        self._keep(number, payload)
        self.post(bytes(ForkingPickler.dumps((_MARK, model_id, payload.version, number, content))))

    def wait(self, deadline: float) -> None:
        if self.answered < self.sent:
            try:
                super().wait(deadline)
            except WeightSyncError:  # the worker refused the new block and still reads the old one
                self._offered = None
                raise
            self._held, self._offered = self._offered, None

    def read(self, version: int, number: int, content: Any) -> Payload:
        if content is not None:
            self._keep(number, Payload(version, *content, number))
        self._known[number].version = version
        return self._known[number]

    def _keep(self, number: int, block: Payload) -> None:
        # Blocks of another layout are never written again, so their memory is released.
        self._known = {known: other for known, other in self._known.items() if other.layout == block.layout}
        self._known[number] = block


class CallTransport(RemoteTransport):
    """Weights are an argument of a call into the worker's process, and the return value is the answer.

    They are applied by the call, or by the next `receive` if the worker has a receiver that polls.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call: Any = None
        self._inbox: SimpleQueue[tuple[str, Payload, SimpleQueue[str]]] = SimpleQueue()
        self._reply: SimpleQueue[str] | None = None

    @abstractmethod
    def call(self, model_id: str, payload: Payload) -> Any:
        """Starts a call of `deliver` in the worker's process."""

    @abstractmethod
    def result(self, call: Any, seconds: float) -> str:
        """The call's result: a problem or "". Raises TimeoutError, or another error if the worker has ended."""

    def send(self, model_id: str, payload: Payload) -> None:
        self._call = self.call(model_id, payload)

    def answer_by(self, deadline: float) -> tuple[int, str]:
        return self.sent, self.result(self._call, max(0.0, deadline - time.monotonic()))

    def receive(self, timeout: float) -> tuple[str, Payload] | None:
        try:
            model_id, self.pending, self._reply = self._inbox.get(timeout=max(timeout, 1e-6))
        except Empty:
            return None
        return model_id, self.pending

    def answer(self, problem: str = "") -> None:
        if self._reply is not None:
            self._reply.put(problem)
            self.pending = self._reply = None

    def take(self, model_id: str, payload: Payload) -> str:
        """Worker's side: queues weights for the receiver's thread, and returns its answer."""
        reply: SimpleQueue[str] = SimpleQueue()
        self._inbox.put((model_id, payload, reply))
        try:
            return reply.get(timeout=_ANSWER_S)
        except Empty:
            return f"the receiver has not polled for {_ANSWER_S:.0f} s"
