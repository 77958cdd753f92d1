"""The transport of tensors between a collector's owner, rank 0, and its workers, ranks 1 to n: a process group, or RPC.

The owner creates a link and pickles it for the workers; then all join it. Batches are sent as one buffer each, weights
by the link's weight sync scheme.
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

_KEPT = 2  # the most batches of a worker that the owner has not fetched
_JOIN_S = 60.0


@dataclass
class Posted:
    """The description of a batch whose memory the owner can fetch from the worker."""

    number: int
    layout: Layout
    num_bytes: int
    batch_size: torch.Size


class Link(ABC):
    """The channel between a collector and its workers: `GroupLink` or `RPCLink`. All connect to the owner's store."""

    scheme: type[WeightSyncScheme]

    def __init__(self, host: str, num_workers: int):
        self._host, self._world = host, num_workers + 1
        timeout = timedelta(seconds=_JOIN_S)
        self.store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        # A free port; workers read it from the pickled link.
        self._port = self.store.port

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "store": None}

    def join(self, rank: int, collector: Any = None) -> None:
        """Connects this process to the others, which must join at the same time; a worker passes its collector."""
        if self.store is None:
            timeout = timedelta(seconds=_JOIN_S)
            self.store = dist.TCPStore(self._host, self._port, is_master=False, timeout=timeout)

    @abstractmethod
    def worker(self, rank: int, model_id: str) -> Any:
        """Owner's side: the connection with which a sender registers a worker."""

    @abstractmethod
    def owner(self, model_id: str) -> Any:
        """Worker's side: the connection that a receiver registers."""

    @abstractmethod
    def post(self, number: int, memory: Tensor, tell: Callable[[], None]) -> None:
        """Worker's side: keeps the memory of a batch for the owner, and calls ``tell`` to announce it."""

    @abstractmethod
    def fetch(self, rank: int, posted: Posted, timeout: float) -> Tensor:
        """Owner's side: returns the memory of a batch. Raises RuntimeError if the worker has ended."""

    @abstractmethod
    def close(self) -> None: ...


def packed(batch: TensorDictBase, number: int) -> tuple[Posted, Tensor]:
    """A batch of tensors as one buffer, with its description."""
    payload = pack({key: batch.get(key) for key in leaf_keys(batch)}, number)
    return Posted(number, payload.layout, payload.memory.numel(), batch.batch_size), payload.memory


def unpacked(posted: Posted, memory: Tensor) -> TensorDictBase:
    batch = keyed(Payload(posted.number, posted.layout, memory).weights, posted.batch_size)
    batch.names = [*[None] * (batch.batch_dims - 1), "time"]
    return batch


class GroupLink(Link):
    """A separate torch.distributed process group; the trainer's own group, if any, is not used.

    backend  "gloo" or "nccl"; with "nccl" messages are in GPU memory, and each process needs its own GPU
    host     the address of the owner
    """

    scheme = DistributedWeightSyncScheme

    def __init__(self, backend: str, host: str, num_workers: int):
        super().__init__(host, num_workers)
        self.backend = backend
        # Two groups, because within one NCCL would make weights and batches between two GPUs wait for each other.
        self._batches: Any = None
        self._weights: Any = None
        self._sent: deque[Any] = deque(maxlen=_KEPT)  # messages in flight, with their memory

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
        tell()  # first: NCCL's send blocks until the owner receives
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
                group.abort()  # does not wait for peers
        self._batches = self._weights = self.store = None


class RPCLink(Link):
    """torch.distributed.rpc; a process can be in one RPC group at a time.

    options  arguments of ``TensorPipeRpcBackendOptions``
    devices  the device of each worker; CUDA tensors are sent to the owner's device of the same name
    """

    scheme = RPCWeightSyncScheme

    def __init__(
        self, host: str, num_workers: int, options: Mapping[str, Any], devices: Sequence[Any] | None, who: str
    ):
        if rpc.api._is_current_rpc_agent_set():
            raise ConfigError(
                f"{who}: torch.distributed.rpc must not be in use in this process: it allows one group at a time; shut "
                "down the other collector, or call rpc.shutdown()."
            )
        if devices is not None and len(devices) != num_workers:
            raise ConfigError(
                f"{who}: visible_devices must have one device per worker: got {len(devices)} for {num_workers}."
            )
        _tensorpipe_options(options, who)
        super().__init__(host, num_workers)
        self._options, self._devices = dict(options), devices
        group = secrets.token_hex(4)  # new names, because torch remembers those of former groups
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
            warnings.simplefilter("ignore")  # torch warns about its own internal calls
            # Like init_rpc, which accepts no store and puts the number of its calls in a process into the store's
            # keys: after an owner's second call its keys would differ from those of its new workers.
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
        # Kept until the owner fetches it by a call: RPC has no send that waits for a receiver.
        _here.batches[number] = memory
        tell()

    def fetch(self, rank: int, posted: Posted, timeout: float) -> Tensor:
        return rpc.rpc_sync(self._names[rank], _take_batch, (posted.number,), timeout=timeout)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            rpc.shutdown(graceful=False)  # does not wait for peers
        self.store = None


# State of a worker's process that the owner's RPC calls read and change.
_here = SimpleNamespace(collector=None, batches={})


class _CollectorThere:
    """Stands in for an RRef to the collector of the process that unpickles it: torch's RRefs outlive their group."""

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
    """Raises ConfigError for a backend that is not available."""
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            f"{who}: backend='mpi' needs a torch that was built with MPI, but this one was not; use 'gloo', or 'nccl' "
            "between GPUs."
        )
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"{who}: backend must be 'gloo' or 'nccl': got {backend!r}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError(f"{who}: backend='nccl' needs a CUDA device, and a torch with NCCL: use 'gloo' here.")
