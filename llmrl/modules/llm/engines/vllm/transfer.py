"""The trainer's half of transferring weights to vLLM's worker processes. The workers' half is in ``worker``.

There is one protocol with three kinds of buffers: host memory (`SharedMemory`), memory of a GPU that both sides use
(`CudaIPC`), a buffer on each side that is broadcast (`NCCL`). Chunks, checksums and barriers are the same.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from llmrl.errors import ConfigError, UnsupportedError, WeightSyncError, did_you_mean
from llmrl.modules.llm.engines.vllm.compat import vllm_module
from llmrl.modules.llm.engines.vllm.core import NothingLoadedError
from llmrl.modules.llm.engines.vllm.worker import place_of_process
from llmrl.modules.llm.engines.weights import WeightSet
from llmrl.weight_update.broadcast import BroadcastBuffer
from llmrl.weight_update.buffers import Buffer, CudaBuffer, SharedBuffer, StoredTensor, padded_size

CallWorkers = Callable[..., list[Any]]  # (method, end, **arguments): each worker's answer, by ``end``


# --- settings ---------------------------------------------------------------------------------------------------------


class TransferSettings(ABC):
    """The settings of a transfer. Equal settings reuse the same buffer."""

    buffer_bytes: int

    def __post_init__(self) -> None:
        if self.buffer_bytes < 128:
            raise ConfigError(f"{type(self).__name__}: buffer_bytes must be at least 128: got {self.buffer_bytes}.")

    @abstractmethod
    def create_buffer(self, size: int, call: CallWorkers, end: float) -> Buffer:
        """Creates a buffer for the workers behind ``call``. Raises OSError, OutOfMemoryError if memory is short."""


@dataclass(frozen=True)
class SharedMemory(TransferSettings):
    """Transfer through shared memory: trainer and workers are on one machine, with or without GPUs. The memory is
    pinned if the trainer has a GPU.

    buffer_bytes  size of the shared memory, kept between updates; one half is loaded while the other is filled. A small
                  buffer is fast: its data is still in the processor's cache. It grows to the size of the largest
                  tensor, and shrinks to the memory that is available

    >>> SharedMemory(buffer_bytes=100)
    Traceback (most recent call last):
        ...
    llmrl.errors.ConfigError: SharedMemory: buffer_bytes must be at least 128: got 100.
    """

    buffer_bytes: int = 1 << 26

    def create_buffer(self, size: int, call: CallWorkers, end: float) -> Buffer:
        return SharedBuffer.create(size)


@dataclass(frozen=True)
class CudaIPC(TransferSettings):
    """Transfer through memory of the trainer's GPU, which must be visible to the workers.

    buffer_bytes  size of the GPU memory, kept between updates, as in `SharedMemory`
    """

    buffer_bytes: int = 1 << 28

    def create_buffer(self, size: int, call: CallWorkers, end: float) -> Buffer:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "VLLMEngine: the ipc transfer goes through memory of a GPU, and this process has none; "
                "backend='shared_memory' needs none. Nothing was updated."
            )
        return CudaBuffer.create(size)


@dataclass(frozen=True)
class NCCL(TransferSettings):
    """Broadcast from the trainer, rank 0, to the workers, which may be on other GPUs and machines. Without GPUs
    it uses gloo. A worker that ends or hangs ends the update.

    num_workers     workers of the engine, over all its replicas: tensor x pipeline x data parallel; None: all that
                    answer
    master_address  address of this process, as seen by the workers
    master_port     None: a free port
    buffer_bytes    buffer size on each side, kept between updates, as in `SharedMemory`
    """

    num_workers: int | None = None
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    buffer_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers is not None and self.num_workers < 1:
            raise ConfigError(f"NCCL: num_workers must be at least 1: got {self.num_workers}.")

    def create_buffer(self, size: int, call: CallWorkers, end: float) -> Buffer:
        workers = call("llmrl_describe", end)
        if self.num_workers not in (None, len(workers)):
            raise ConfigError(
                f"NCCL: num_workers must be that of the engine: got {self.num_workers}, but {len(workers)} answer."
            )
        device = "cpu" if None in (workers[0]["gpu"], place_of_process()["gpu"]) else "cuda"
        port = self.master_port or vllm_module("vllm.utils.network_utils").get_open_port()
        return BroadcastBuffer(size, device, self.master_address, port, 1 + len(workers))


_NAMED: dict[str, TransferSettings] = {"shared_memory": SharedMemory(), "nccl": NCCL(), "ipc": CudaIPC()}


def transfer_settings(given: str | TransferSettings | None) -> TransferSettings | None:
    """The settings for a name, or the given settings; None for "auto". Raises ConfigError for an unknown name."""
    if given is None or given == "auto":
        return None
    if isinstance(given, str) and given not in _NAMED:
        raise ConfigError(
            f"VLLMEngine: weight_backend must be one of auto, {', '.join(_NAMED)}: got {given!r}."
            f"{did_you_mean(given, _NAMED)}"
        )
    return _NAMED[given] if isinstance(given, str) else given


def nearest_transfer(trainer: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> TransferSettings:
    """The shortest path from a trainer to an engine's workers; places as of `place_of_process`.

    >>> trainer = {"machine": "a", "gpu": "0", "sees": ["0", "1"]}
    >>> [type(nearest_transfer(trainer, [worker])).__name__ for worker in (
    ...     trainer, {**trainer, "gpu": "1"}, {**trainer, "gpu": None, "sees": []})]
    ['CudaIPC', 'NCCL', 'SharedMemory']
    """
    near = all(worker["machine"] == trainer["machine"] for worker in workers)
    gpus = [worker["gpu"] for worker in workers]
    if near and trainer["gpu"] in gpus and trainer["gpu"] is not None:
        # NCCL refuses two ranks on one GPU; a CUDA IPC handle works for every process that sees its GPU.
        return CudaIPC() if all(trainer["gpu"] in worker["sees"] for worker in workers) else SharedMemory()
    if near and None in (trainer["gpu"], *gpus):
        return SharedMemory()
    return NCCL() if near else NCCL(master_address=_address_for([worker["machine"].split()[0] for worker in workers]))


def _address_for(hosts: Sequence[str]) -> str:
    """An address of this machine that the hosts can reach: vLLM's, or without a default route that of the route to one
    of them.
    """
    found = vllm_module("vllm.utils.network_utils").get_ip()
    if found not in ("", "0.0.0.0", "::"):
        return found
    for host in hosts:
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing: it only looks up the route
                if not (own := probe.getsockname()[0]).startswith(("127.", "::1")):
                    return own
    raise ConfigError(
        f"VLLMEngine: this machine must have an address that its workers on {', '.join(sorted(set(hosts)))} can reach: "
        "got no default route and no route to those names; set VLLM_HOST_IP, or "
        "weight_backend=NCCL(master_address=...). Nothing was updated."
    )


# --- the transfer -----------------------------------------------------------------------------------------------------


class WeightTransfer:
    """Transfers weights through one buffer: written once here, read once by every worker, checksummed on both sides.

    The model is never copied whole: a tensor is in the buffer only while it is loaded. Weights that fit into half
    of the buffer are all verified before the first one is loaded. The buffer is kept until the settings change or an
    update fails.
    """

    def __init__(self, call: CallWorkers) -> None:
        self._call = call
        self._settings: TransferSettings | None = None
        self._buffer: Buffer | None = None
        self._half = 0
        self._touched = False  # True if some weights of an update may have been loaded

    def send(self, weights: WeightSet, end: float, settings: TransferSettings) -> None:
        """Sends a complete set. Raises NothingLoadedError if it failed before the first weight was loaded."""
        if settings != self._settings:
            self.close()
        self._settings, self._touched = settings, False
        try:
            self._reserve(weights, end)
            self._call("llmrl_start", end)
            with ThreadPoolExecutor(1, thread_name_prefix="llmrl-weights") as pool:  # exit waits, at most until ``end``
                loading: Future[list[list[str]]] | None = None
                try:
                    # One half is written while the workers load the other.
                    for stored in self._fill_halves(weights):
                        self._await_loaded(loading)
                        loading = None
                        if stored:
                            stored = self._buffer.sealed(stored)
                            first, last = stored[0].offset, stored[-1].offset + padded_size(stored[-1].num_bytes)
                            loading = pool.submit(
                                self._call, "llmrl_receive", end, stored=stored, start=first, stop=last
                            )
                            self._buffer.pass_on(first, last)
                finally:
                    self._await_loaded(loading)
            self._finish(end)
        except BaseException as error:
            self.close()  # the workers may have changed by the next update
            if self._touched or not isinstance(error, Exception) or isinstance(error, UnsupportedError):
                raise
            raise NothingLoadedError(f"{error} Nothing was updated.") from error

    def close(self) -> None:
        """Releases the buffer; its memory is freed once the workers have also exited, or have opened another one."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def _reserve(self, weights: WeightSet, end: float) -> None:
        """Creates a buffer for these weights unless there is one. On return all workers have opened it, and its path is
        deleted.
        """
        sizes = {name: padded_size(shape.numel() * dtype.itemsize) for name, (dtype, shape) in weights.sent.items()}
        largest, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
        # Weights that fit into one half need no second one; a tensor larger than a half gets the whole buffer.
        half = min(padded_size(self._settings.buffer_bytes // 2), total)
        size = max(half if half == total else 2 * half, sizes[largest])
        if self._buffer is not None and self._buffer.size >= size:
            self._half = self._half_of(total)
            return
        self._buffer = None
        while True:
            try:
                buffer = self._settings.create_buffer(size, self._call, end)
                break
            except (OSError, torch.OutOfMemoryError) as error:
                if size == sizes[largest]:
                    remedy = "give the machine more of it (a container: --shm-size)"
                    memory, remedy = ("shared", remedy) if isinstance(error, OSError) else ("GPU", "free some of it")
                    raise WeightSyncError(
                        f"VLLMEngine: {largest} needs {size / 2**20:.0f} MiB of {memory} memory: {error}; {remedy}."
                    ) from error
                # Retry with half the size, down to one tensor at a time.
                half = padded_size(half // 2)
                size = max(2 * half if half > 64 else 0, sizes[largest])
        buffer.connect(lambda info: self._call("llmrl_open_buffer", end, info=info))
        self._buffer = buffer
        self._half = self._half_of(total)

    def _half_of(self, total: int) -> int:
        """Bytes that are sent at a time: one half is filled while the other is loaded, unless the buffer holds all
        ``total`` bytes exactly. In a buffer that grew to the size of the largest tensor the halves grow too.
        """
        return self._buffer.size if self._buffer.size == total else self._buffer.size // 2 // 64 * 64

    def _fill_halves(self, weights: WeightSet) -> Iterator[list[StoredTensor]]:
        """Writes the halves of the buffer in turn, and yields the tensors in each. The caller must load a half before
        it requests the next but one, and must load everything before it continues after an empty list.
        """
        assert self._buffer is not None
        stored: list[StoredTensor] = []
        start = offset = 0
        for name, tensor in weights.pairs():
            size = padded_size(tensor.numel() * tensor.itemsize)
            if size > self._half:  # a tensor that needs the whole buffer
                yield stored
                yield []
                yield [self._buffer.write(name, tensor, offset=0)]
                yield []
                start, offset, stored = 0, 0, []
                continue
            if offset + size > self._half:  # on to the other half
                yield stored
                start, offset, stored = self._half - start, 0, []
            stored.append(self._buffer.write(name, tensor, offset=start + offset))
            offset += size
        yield stored

    def _await_loaded(self, loading: Future[list[list[str]]] | None) -> None:
        """Waits until the workers have loaded their part. Raises if one of them found damaged tensors."""
        if loading is None:
            return
        try:
            answers = loading.result()
        except BaseException:
            self._touched = True  # no answer: the workers may have loaded some of it
            raise
        self._touched |= not all(answers)  # a worker without damaged tensors has loaded its share
        for worker, damaged in enumerate(answers):
            if damaged:
                raise WeightSyncError(
                    f"VLLMEngine: {damaged[0]} must arrive as it was sent: worker {worker} read other bytes "
                    f"({len(damaged)} tensors with a wrong checksum)."
                )

    def _finish(self, end: float) -> None:
        """Ends the update. Raises if a worker's model does not hold the sent weights."""
        for worker, findings in enumerate(self._call("llmrl_finish", end)):
            for what, names in findings.items():
                if names:
                    raise WeightSyncError(
                        f"VLLMEngine: every parameter must have its new value: in worker {worker} {names[0]} {what} "
                        f"({len(names)} in all)."
                    )
