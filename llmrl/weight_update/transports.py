"""Transports: weights from a sender to one worker, and the worker's answer back.

A transport has one version under way at a time: `send_weights` hands it over and returns, `wait` waits until the worker
has answered for it. The worker's end is the same class around the other end of the pipe.
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
import torch.multiprocessing  # teaches Python's pickler of messages to share the memory of tensors
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.errors import ConfigError, DeadlineError, WeightSyncError, WorkerError
from llmrl.weight_update.payload import Payload, Slots, pack
from llmrl.weight_update.target import named_tensors

_MARK = "llmrl-weights"
_CHUNK = 1 << 20  # bytes of one message: a pipe's reader needs memory for a whole one
_ANSWER_S = 3600.0  # longest that a call waits in the worker; the sender gives up before
_SMALL = 1 << 14  # bytes that an empty pipe takes without a reader


class TransportBackend(ABC):
    """One worker's connection. A sender calls `send_weights` and `wait`, a receiver `receive` and `answer`.

    peer      the other side, for messages
    strategy  the form of what `receive_weights` returns: a "state_dict" (flat, dotted names) or a "tensordict" (nested)
    sent      the version that was handed over last; ``answered`` the one that the worker answered for last
    """

    def __init__(self, *, timeout: float = 10.0, strategy: str = "state_dict") -> None:
        self.timeout, self.strategy, self.peer = timeout, strategy, "worker"
        self.sent = self.answered = 0
        self.pending: Payload | None = None  # received, and not answered yet

    @abstractmethod
    def receive(self, timeout: float) -> tuple[str, Payload] | None:
        """The worker's side: model id and weights, or None if nothing came in ``timeout`` seconds."""

    @abstractmethod
    def answer(self, problem: str = "") -> None:
        """The worker's side: tells the sender that ``pending`` was applied, or why it was not."""

    @abstractmethod
    def send_weights(self, model_id: str, weights: Any) -> None:
        """Hands weights over: a `Payload`, which has a version, or named tensors, under the next one."""

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Returns when the worker has applied what was sent.

        Raises  WeightSyncError if it refused, DeadlineError at ``deadline`` (of `time.monotonic`), WorkerError if
                it has ended
        """

    def check_connection(self) -> bool:
        """True if weights can be sent or received."""
        return True

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """`receive` with the weights in the form of ``strategy``; views of memory that stays as it is until they are
        answered for.
        """
        if (received := self.receive(timeout)) is None:
            return None
        weights: Any = received[1].weights
        return received[0], TensorDict(weights).unflatten_keys(".") if self.strategy == "tensordict" else weights


class DirectTransport(TransportBackend):
    """A receiver in this process, which has the weights when `send_weights` returns; by itself it sends nothing."""

    def _do_nothing(self, *arguments: Any) -> None:
        pass

    send_weights = wait = receive = answer = _do_nothing


class RemoteTransport(TransportBackend):
    """Base of the transports to a worker elsewhere, which answers each version: one `send_weights` and one `wait`."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        payload = weights if isinstance(weights, Payload) else self.pack(model_id, named_tensors(weights))
        self.send(model_id, payload)
        self.sent = payload.version

    def pack(self, model_id: str, weights: Mapping[str, Tensor]) -> Payload:
        return pack(weights, self.sent + 1)

    @abstractmethod
    def send(self, model_id: str, payload: Payload) -> None:
        """Hands the payload over, and does not wait for the worker."""

    @abstractmethod
    def answer_by(self, deadline: float) -> tuple[int, str]:
        """The worker's next answer: a version, and what is wrong or "". Raises TimeoutError at the deadline (of
        `time.monotonic`), any other error if the worker has ended.
        """

    def wait(self, deadline: float) -> None:
        while self.answered < self.sent:  # an answer may be for an earlier version, of a connection registered again
            try:
                self.answered, problem = self.answer_by(deadline)
            except TimeoutError:
                raise DeadlineError(
                    f"{self.peer} must take version {self.sent} of the weights in time: it has not answered, its "
                    f"version is {self.answered}. Its receiver must poll (`receiver.receive()`); a worker that is gone "
                    "is taken out by `sender.unregister_worker`."
                ) from None
            except Exception as error:
                raise WorkerError(
                    f"{self.peer} must be there to take version {self.sent} of the weights: its process ended or "
                    f"closed the connection ({type(error).__name__}). Start it again and register it, or "
                    "`sender.unregister_worker`."
                ) from error
            if problem:
                raise WeightSyncError(f"{self.peer} refused version {self.answered} and keeps its weights: {problem}")


class PipeTransport(RemoteTransport):
    """Base of the transports over a duplex `multiprocessing.Pipe`, which must carry nothing else."""

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(**options)
        self.pipe = pipe
        if pipe is not None:
            self.register_pipe(pipe)

    def register_pipe(self, pipe: Any) -> None:
        """Sets this side's end."""
        if not (getattr(pipe, "readable", False) and getattr(pipe, "writable", False)):
            raise ConfigError(
                f"{type(self).__name__}: needs one end of a duplex multiprocessing.Pipe(): got {type(pipe).__name__}."
            )
        self.pipe = pipe

    def check_connection(self) -> bool:
        return self.pipe is not None and not self.pipe.closed

    def post(self, header: bytes, memory: Tensor | None = None) -> None:
        """Writes a message, in a thread if the pipe may not take it before the worker reads."""

        def write() -> None:
            with contextlib.suppress(OSError):  # `wait` finds the closed pipe
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
            with contextlib.suppress(OSError):  # the next `receive` finds the closed pipe
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
        """The weights of a message whose header was read."""


class MPTransport(PipeTransport):
    """Weights go through the pipe itself: no shared memory is needed."""

    def __init__(self, pipe_connection: Any, timeout: float = 10.0, *, strategy: str = "state_dict") -> None:
        super().__init__(pipe_connection, timeout=timeout, strategy=strategy)

    def send(self, model_id: str, payload: Payload) -> None:
        header = pickle.dumps((_MARK, model_id, payload.version, payload.layout, payload.memory.numel()))
        self.post(header, payload.memory)

    def read(self, version: int, layout: Any, size: int) -> Payload:
        memory = torch.empty(size, dtype=torch.uint8)
        data, start, deadline = memoryview(memory.numpy()), 0, time.monotonic() + self.timeout
        while start < size:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(
                    f"WeightReceiver: version {version} must arrive within {self.timeout} s: got {start} of {size} "
                    "bytes; the sender is stopped or the machine is busy."
                )
            start += self.pipe.recv_bytes_into(data[start:])
        return Payload(version, layout, memory)


class SharedMemTransport(PipeTransport):
    """Weights lie in blocks of shared memory, one for all workers; the pipe carries the number of the block.

    The worker's parameters become views of the block. It is written again after the worker has gone on to the next.

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
        self._offered: int | None = None  # the block that it was offered last
        self._known: dict[int, Payload] = {}  # blocks that both sides have

    @property
    def busy(self) -> set[int]:
        """Numbers of the blocks that the worker may be reading."""
        return {number for number in (self._held, self._offered) if number is not None}

    def register_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Declares the weights of a model id. They are written at every update, for processes that hold them too and
        can do with reading them while they change; receivers never see a mixture.
        """
        if not isinstance(weights, TensorDictBase):
            raise ConfigError(f"SharedMemTransport: weights must be a TensorDict: got {type(weights).__name__}.")
        self.registered[model_id] = weights

    def pack(self, model_id: str, weights: Mapping[str, Tensor]) -> Payload:
        self.wait(time.monotonic() + self.timeout)  # then at most one block is the worker's
        return self._own.write(model_id, weights, self.sent + 1, [self])

    def send(self, model_id: str, payload: Payload) -> None:
        number = self._offered = payload.slot
        # The block itself travels once, and stays mapped in the worker.
        content = None if self._known.get(number) is payload else (payload.layout, payload.memory)
        self._keep(number, payload)
        self.post(bytes(ForkingPickler.dumps((_MARK, model_id, payload.version, number, content))))

    def wait(self, deadline: float) -> None:
        if self.answered < self.sent:
            try:
                super().wait(deadline)
            except WeightSyncError:  # it refused, and still reads the block that it held
                self._offered = None
                raise
            self._held, self._offered = self._offered, None

    def read(self, version: int, number: int, content: Any) -> Payload:
        if content is not None:
            self._keep(number, Payload(version, *content, number))
        self._known[number].version = version
        return self._known[number]

    def _keep(self, number: int, block: Payload) -> None:
        # Blocks of another layout are never written again: their memory is to be free.
        self._known = {known: other for known, other in self._known.items() if other.layout == block.layout}
        self._known[number] = block


class CallTransport(RemoteTransport):
    """Weights are an argument of a call into the worker's process, whose return is the answer.

    They are applied by the call, or if the worker has a receiver that polls, by its next `receive`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call: Any = None
        self._inbox: SimpleQueue[tuple[str, Payload, SimpleQueue[str]]] = SimpleQueue()
        self._reply: SimpleQueue[str] | None = None

    @abstractmethod
    def call(self, model_id: str, payload: Payload) -> Any:
        """Starts the call, of `deliver` in the worker's process."""

    @abstractmethod
    def result(self, call: Any, seconds: float) -> str:
        """The call's result: a problem or "". Raises TimeoutError; another error if the worker is gone."""

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
        """In the worker: leaves weights for the receiver's thread, and returns its answer."""
        reply: SimpleQueue[str] = SimpleQueue()
        self._inbox.put((model_id, payload, reply))
        try:
            return reply.get(timeout=_ANSWER_S)
        except Empty:
            return f"the receiver has not polled for {_ANSWER_S:.0f} s"
