"""Weights between two ranks of a torch.distributed group, announced and answered through the group's store."""

from __future__ import annotations

import pickle
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmrl.errors import ConfigError, WorkerError
from llmrl.weight_update.payload import Payload
from llmrl.weight_update.schemes import WeightSyncScheme
from llmrl.weight_update.transports import RemoteTransport

_POLL_S = 1e-3


class DistributedTransport(RemoteTransport):
    """Weights between this rank and ``rank``, in one message.

    store    the group's store, for announcements and answers; None: that of the default group
    sync     not used here; the scheme's ``sync`` decides whether updates wait
    channel  a name for each model, the same on both sides
    group    a torch.distributed ProcessGroup; None: the default group
    device   device of the messages: "cuda" for a group with backend nccl
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        *,
        channel: str = "policy",
        group: Any = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        self._rank, self.sync, self._device = rank or 0, sync, device
        self._group = dist.group.WORLD if group is None else group
        self._tag = zlib.crc32(channel.encode()) >> 1  # one per model: receivers read models in any order
        me = self._group.rank()
        self._out, self._in = (f"llmrl/{channel}/{a}-{b}/" for a, b in ((me, self._rank), (self._rank, me)))
        # Counted in the store, so that a new sender or receiver continues where the previous one stopped.
        self._sent_count, self._received_count = 0, int(self._store.add(f"{self._in}received", 0))
        self._work: Any = None  # the message in flight, with its memory
        self._failure: RuntimeError | None = None

    def send(self, model_id: str, payload: Payload) -> None:
        self._sent_count = int(self._store.add(f"{self._out}sent", 1))
        memory = payload.memory.to(self._device)
        header = pickle.dumps((model_id, payload.version, payload.layout, memory.numel()))
        try:
            self._store.set(f"{self._out}{self._sent_count}", header)  # first: NCCL may block until the peer receives
            self._work = self._group.send([memory], self._rank, self._tag), memory  # kept until the answer
        except RuntimeError as error:
            self._failure = error  # `wait` raises it, so that the other workers still get their weights

    def answer_by(self, deadline: float) -> tuple[int, str]:
        key = f"{self._out}{self._sent_count}/answer"
        while self._failure is None and not self._store.check([key]):
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
        if self._failure is not None:
            raise self._failure
        problem, self._work = self._store.get(key).decode(), None
        self._store.delete_key(key)
        return self.sent, problem

    def receive(self, timeout: float) -> tuple[str, Payload] | None:
        key, deadline = f"{self._in}{self._received_count + 1}", time.monotonic() + timeout
        try:
            while not self._store.check([key]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_S)
            model_id, version, layout, size = pickle.loads(self._store.get(key))
            self._store.delete_key(key)
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._group.recv([memory], self._rank, self._tag).wait(timedelta(seconds=self.timeout))
        except (dist.DistError, RuntimeError) as error:
            raise WorkerError(
                f"WeightReceiver: rank {self._rank} must be running to send weights: it ended or did not send "
                f"({type(error).__name__}: {error})."
            ) from error
        self._received_count = int(self._store.add(f"{self._in}received", 1))
        self.pending = Payload(version, layout, memory)
        return model_id, self.pending

    def answer(self, problem: str = "") -> None:
        if self.pending is not None:
            self.pending = None
            self._store.set(f"{self._in}{self._received_count}/answer", problem)


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Weights by point-to-point messages. ``pipe_or_context`` is the other rank, or a tuple (store, rank),
    (store, rank, channel) or (store, rank, channel, group): each model sent between the same two ranks needs a channel.

    backend  the group's backend, "gloo" or "nccl"
    sync     True: updates return when the workers have answered; False: once the weights are sent
    """

    def __init__(self, backend: str = "gloo", sync: bool = True, *, timeout: float = 10.0) -> None:
        super().__init__("tensordict", timeout=timeout)
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"DistributedWeightSyncScheme: backend must be 'gloo' or 'nccl': got {backend!r}.")
        self.backend, self.sync = backend, sync

    def create_transport(self, pipe_or_context: Any) -> DistributedTransport:
        store, rank, *more = pipe_or_context if isinstance(pipe_or_context, tuple) else (None, pipe_or_context)
        options = dict(zip(("channel", "group"), more, strict=False))
        device = "cuda" if self.backend == "nccl" else "cpu"
        return DistributedTransport(store, rank, self.sync, device=device, timeout=self.timeout, **options)
