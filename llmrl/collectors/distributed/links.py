"""The transport of tensors between a collector's owner, rank 0, and its workers, ranks 1 to n: a process group, or RPC.

A link is made by the owner, pickled for the workers, and joined by all. Batches go through it as one piece of memory,
weights by the scheme that belongs to it.
"""

from __future__ import annotations

import secrets
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from llmrl.data.ted_utils import leaf_keys
from llmrl.envs.batched import keyed
from llmrl.errors import ConfigError
from llmrl.weight_update import DistributedWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme
from llmrl.weight_update.payload import Layout, Payload, pack

_KEPT = 2  # batches of a worker that its owner has not fetched
_JOIN_S = 60.0


@dataclass
class Posted:
    """A batch whose memory waits in the worker to be fetched."""

    number: int
    layout: Layout
    num_bytes: int
    batch_size: torch.Size


class Link(ABC):
    """The channel between a collector and its workers: `GroupLink` or `RPCLink`, which meet at a store of the owner."""

    scheme: type[WeightSyncScheme]

    def __init__(self, host: str, num_workers: int):
        self._host, self._world = host, num_workers + 1
        timeout = timedelta(seconds=_JOIN_S)
        self.store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        # A free port, which the workers are told in the pickled link.
        self._port = self.store.port

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "store": None}

    def join(self, rank: int, collector: Any = None) -> None:
        """Connects this process to the others, which join at the same time; in a worker with its collector."""
        if self.store is None:
            timeout = timedelta(seconds=_JOIN_S)
            self.store = dist.TCPStore(self._host, self._port, is_master=False, timeout=timeout)

    @abstractmethod
    def worker(self, rank: int, model_id: str) -> Any:
        """The owner's side: what a sender registers a worker with."""

    @abstractmethod
    def owner(self, model_id: str) -> Any:
        """The worker's side: what a receiver registers."""

    @abstractmethod
    def post(self, number: int, memory: Tensor, tell: Callable[[], None]) -> None:
        """The worker's side: keeps the memory of a batch ready, and calls ``tell`` to announce it to the owner."""

    @abstractmethod
    def fetch(self, rank: int, posted: Posted, timeout: float) -> Tensor:
        """The owner's side: the memory of a batch. Raises RuntimeError if the worker has ended."""

    @abstractmethod
    def close(self) -> None: ...


def packed(batch: TensorDictBase, number: int) -> tuple[Posted, Tensor]:
    """A batch of tensors as one piece of memory."""
    payload = pack({key: batch.get(key) for key in leaf_keys(batch)}, number)
    return Posted(number, payload.layout, payload.memory.numel(), batch.batch_size), payload.memory


def unpacked(posted: Posted, memory: Tensor) -> TensorDictBase:
    batch = keyed(Payload(posted.number, posted.layout, memory).weights, posted.batch_size)
    batch.names = [*[None] * (batch.batch_dims - 1), "time"]
    return batch


class GroupLink(Link):
    """A torch.distributed process group of its own: that of a trainer, if there is one, is left alone.

    backend  "gloo", or "nccl": then messages lie in the memory of a GPU that each process has to itself
    host     the address of the owner
    """

    scheme = DistributedWeightSyncScheme

    def __init__(self, backend: str, host: str, num_workers: int):
        super().__init__(host, num_workers)
        self.backend = backend
        # Two, since messages between two GPUs wait for each other in the order of their group, in both directions.
        self._batches: Any = None
        self._weights: Any = None
        self._sent: deque[Any] = deque(maxlen=_KEPT)  # messages under way, with their memory

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_batches": None, "_weights": None}

    def join(self, rank: int, collector: Any = None) -> None:
        super().join(rank, collector)
        if self.backend == "nccl" and rank > 0:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        kind = dist.ProcessGroupNCCL if self.backend == "nccl" else dist.ProcessGroupGloo
        self._batches, self._weights = (
            kind(dist.PrefixStore(f"llmrl/{name}", self.store), rank, self._world, timedelta(seconds=_JOIN_S))
            for name in ("batches", "weights")
        )

    def worker(self, rank: int, model_id: str) -> Any:
        return (self.store, rank, model_id, self._weights)

    def owner(self, model_id: str) -> Any:
        return (self.store, 0, model_id, self._weights)

    def post(self, number: int, memory: Tensor, tell: Callable[[], None]) -> None:
        tell()  # before: between GPUs sending waits until the owner receives
        memory = memory.to(self._device)
        self._sent.append((self._batches.send([memory], 0, 0), memory))

    def fetch(self, rank: int, posted: Posted, timeout: float) -> Tensor:
        memory = torch.empty(posted.num_bytes, dtype=torch.uint8, device=self._device)
        self._batches.recv([memory], rank, 0).wait(timedelta(seconds=timeout))
        return memory.cpu()

    @property
    def _device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def close(self) -> None:
        for group in (self._batches, self._weights):
            if group is not None and self.backend == "nccl":
                group.abort()  # waits for no peer
        self._batches = self._weights = self.store = None


class RPCLink(Link):
    """torch.distributed.rpc; a process can have one group at a time.

    options  of ``TensorPipeRpcBackendOptions``
    devices  the device of each worker that has tensors on a GPU; the owner has one of the same name
    """

    scheme = RPCWeightSyncScheme

    def __init__(
        self, host: str, num_workers: int, options: Mapping[str, Any], devices: Sequence[Any] | None, who: str
    ):
        if rpc.api._is_current_rpc_agent_set():
            raise ConfigError(
                f"{who}: torch.distributed.rpc must not be in use in this process: it has one group at a time; shut "
                "down the other collector, or call rpc.shutdown()."
            )
        if devices is not None and len(devices) != num_workers:
            raise ConfigError(
                f"{who}: visible_devices must have one device per worker: got {len(devices)} for {num_workers}."
            )
        _tensorpipe_options(options, who)
        super().__init__(host, num_workers)
        self._options, self._devices = dict(options), devices
        group = secrets.token_hex(4)  # torch remembers the names of former groups
        self._names = [f"trainer-{group}", *(f"worker{index}-{group}" for index in range(num_workers))]
        self._is_open = False

    def join(self, rank: int, collector: Any = None) -> None:
        super().join(rank, collector)
        _here.collector = collector
        options = _tensorpipe_options(self._options, "RPCDataCollector")
        for worker, device in enumerate(self._devices or (), start=1):
            if torch.device(device).type != "cpu" and rank in (0, worker):
                options.set_device_map(self._names[worker if rank == 0 else 0], {device: device})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its own calls
            # As init_rpc does, which takes no store and counts its calls: the second one of an owner meets no worker.
            dist_autograd._init(rank)
            rpc._init_rpc_backend(
                store=dist.PrefixStore("llmrl/rpc", self.store),
                name=self._names[rank],
                rank=rank,
                world_size=self._world,
                rpc_backend_options=options,
            )
        self._is_open = True

    def worker(self, rank: int, model_id: str) -> Any:
        return (self._names[rank], _CollectorThere(), None)

    def owner(self, model_id: str) -> Any:
        return None

    def post(self, number: int, memory: Tensor, tell: Callable[[], None]) -> None:
        # Kept until the owner fetches it by a call: RPC cannot send memory that waits for its receiver.
        _here.batches[number] = memory
        tell()

    def fetch(self, rank: int, posted: Posted, timeout: float) -> Tensor:
        return rpc.rpc_sync(self._names[rank], _take_batch, (posted.number,), timeout=timeout)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            rpc.shutdown(graceful=False)  # waits for no peer
        self.store = None


# The state of a worker's process that the owner's calls read and change.
_here = SimpleNamespace(collector=None, batches={})


class _CollectorThere:
    """The collector of the process that calls, in place of a remote reference: those outlive their group in torch."""

    def local_value(self) -> Any:
        return _here.collector


def _take_batch(number: int) -> Tensor:
    return _here.batches.pop(number)


def _tensorpipe_options(given: Mapping[str, Any], who: str) -> Any:
    try:
        return rpc.TensorPipeRpcBackendOptions(**given)
    except TypeError as error:
        raise ConfigError(
            f"{who}: tensorpipe_options must be arguments of torch.distributed.rpc.TensorPipeRpcBackendOptions: got "
            f"{dict(given)} ({error})."
        ) from error


def check_backend(backend: str, who: str) -> None:
    """Raises ConfigError for a backend that cannot be used here."""
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            f"{who}: backend='mpi' needs a torch that was built with MPI, and this one was not; use 'gloo', or 'nccl' "
            "between GPUs."
        )
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"{who}: backend must be 'gloo' or 'nccl': got {backend!r}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError(f"{who}: backend='nccl' needs a CUDA device, and a torch with NCCL: use 'gloo' here.")
