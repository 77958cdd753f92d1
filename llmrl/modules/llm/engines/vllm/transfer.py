"""The trainer's half of moving weights into the worker processes of a vLLM engine.

`SharedMemory` is a transfer of ours, with or without GPUs; `NCCL` and `CudaIPC` are vLLM's own between GPUs. The
workers' half is in ``worker``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from llmrl.errors import ConfigError, UnsupportedError, WeightSyncError, did_you_mean
from llmrl.modules.llm.engines.vllm.compat import vllm_module
from llmrl.modules.llm.engines.vllm.core import NothingLoadedError
from llmrl.modules.llm.engines.vllm.shared_memory import SharedBuffer, StoredTensor, padded_size
from llmrl.modules.llm.engines.weights import WeightSet

__all__ = [
    "NCCL",
    "SHARED_MEMORY",
    "CallWorkers",
    "CudaIPC",
    "SharedMemory",
    "Transfer",
    "TransferCache",
    "TransferSettings",
    "transfer_settings",
]

SHARED_MEMORY = "llmrl_shared_memory"  # the name of our transfer in vLLM's factory


class CallWorkers(Protocol):
    """Calls a method in every worker: the answer of each, by ``end`` (of `time.monotonic`) or an error."""

    def __call__(self, method: str, end: float, **arguments: Any) -> list[Any]: ...


class Transfer(Protocol):
    """A connection that sends weights, kept open until ``close``.

    ``send`` raises NothingLoadedError where the engine still has its old weights, another error where it may not.
    """

    def send(self, weights: WeightSet, end: float) -> None: ...

    def close(self) -> None: ...


class TransferSettings(Protocol):
    """The settings of a transfer. Equal settings are the same transfer."""

    def connect(self, call: CallWorkers) -> Transfer: ...


class TransferCache:
    """The transfer of one engine: kept between updates, replaced for other settings, and after an error, because the
    workers may be others by then.
    """

    def __init__(self, call: CallWorkers) -> None:
        self._call = call
        self._settings: TransferSettings | None = None
        self._transfer: Transfer | None = None

    def send(self, weights: WeightSet, end: float, settings: TransferSettings) -> None:
        if self._transfer is None or settings != self._settings:
            self.close()
            self._settings, self._transfer = settings, settings.connect(self._call)
        try:
            self._transfer.send(weights, end)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()


# --- shared memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedMemory:
    """The transfer through memory that trainer and workers share: both on one machine, with or without GPUs.

    buffer_bytes  of shared memory, kept between updates; one half is loaded while the other is filled. Small is fast:
                  what was just written is still in the processor's cache. It grows to the largest tensor, and shrinks
                  to what the machine has to give

    >>> SharedMemory(buffer_bytes=100)
    Traceback (most recent call last):
        ...
    llmrl.errors.ConfigError: SharedMemory: buffer_bytes must be at least 128: got 100.
    """

    buffer_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        if self.buffer_bytes < 128:
            raise ConfigError(f"SharedMemory: buffer_bytes must be at least 128: got {self.buffer_bytes}.")

    def connect(self, call: CallWorkers) -> Transfer:
        return _SharedMemoryTransfer(call, self.buffer_bytes)


class _SharedMemoryTransfer:
    """Weights through one buffer: written once here, read once by every worker, with a checksum on both sides.

    No second copy of the model exists: a tensor is in the buffer while it is loaded. Weights that fit into half of the
    buffer are all verified before the first one is loaded.
    """

    def __init__(self, call: CallWorkers, buffer_bytes: int) -> None:
        self._call, self._buffer_bytes = call, buffer_bytes
        self._buffer: SharedBuffer | None = None
        self._half = 0
        self._touched = False  # whether some of an update's weights may be loaded

    def send(self, weights: WeightSet, end: float) -> None:
        self._touched = False
        try:
            self._reserve(weights, end)
            self._call("llmrl_start", end)
            with ThreadPoolExecutor(1, thread_name_prefix="llmrl-weights") as pool:  # a call ends by its deadline
                loading: Future[list[list[str]]] | None = None
                try:
                    # One half is written while the workers load the other.
                    for stored in self._fill_halves(weights):
                        self._await_loaded(loading)
                        loading = pool.submit(self._call, "llmrl_receive", end, stored=stored) if stored else None
                finally:
                    self._await_loaded(loading)
            self._finish(end)
        except Exception as error:
            if self._touched:
                raise
            raise NothingLoadedError(f"{error} Nothing was updated.") from error

    def close(self) -> None:
        """Releases the buffer; its memory is free once the workers have ended too, or have opened another one."""
        self._buffer = None

    def _reserve(self, weights: WeightSet, end: float) -> None:
        """Creates a buffer for these weights, unless there is one; every worker has mapped it and its path is gone."""
        sizes = {name: padded_size(shape.numel() * dtype.itemsize) for name, (dtype, shape) in weights.metadata.items()}
        largest, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
        half = min(padded_size(self._buffer_bytes // 2), total)
        size = max(half if half == total else 2 * half, sizes[largest])
        if self._buffer is not None and self._buffer.size >= size:
            return
        self._buffer = None
        while True:
            try:
                buffer = SharedBuffer.create(size)
                break
            except OSError as error:
                if size == sizes[largest]:
                    raise WeightSyncError(
                        f"VLLMEngine: {largest} needs {size / 2**20:.0f} MiB of shared memory: {error}; give the "
                        "machine more of it (a container: --shm-size)."
                    ) from error
                half = padded_size(half // 2)
                size = max(2 * half if half > 64 else 0, sizes[largest])
        try:
            init_info = {"path": buffer.path, "size": buffer.size}
            self._call("llmrl_open_transfer", end, backend=SHARED_MEMORY, init_info=init_info)
        finally:
            buffer.unlink()
        self._buffer, self._half = buffer, half

    def _fill_halves(self, weights: WeightSet) -> Iterator[list[StoredTensor]]:
        """Writes one half of the buffer after the other, and yields what it holds. The caller must have had one half
        loaded before it asks for the next but one, and everything before it asks for what follows an empty list.
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
            if offset + size > self._half:
                yield stored
                start, offset, stored = self._half - start, 0, []
            stored.append(self._buffer.write(name, tensor, offset=start + offset))
            offset += size
        yield stored

    def _await_loaded(self, loading: Future[list[list[str]]] | None) -> None:
        """Waits until the workers have loaded what they were given. Raises where one found it damaged."""
        if loading is None:
            return
        try:
            answers = loading.result()
        except BaseException:
            self._touched = True
            raise
        self._touched |= not all(answers)
        for worker, damaged in enumerate(answers):
            if damaged:
                raise WeightSyncError(
                    f"VLLMEngine: {damaged[0]} must arrive as it was sent: worker {worker} read other bytes "
                    f"({len(damaged)} tensors with a wrong checksum)."
                )

    def _finish(self, end: float) -> None:
        """Ends the update. Raises where a worker's model does not have what was sent."""
        for worker, findings in enumerate(self._call("llmrl_finish", end)):
            for what, names in findings.items():
                if names:
                    raise WeightSyncError(
                        f"VLLMEngine: every parameter must have its new value: in worker {worker} {names[0]} {what} "
                        f"({len(names)} in all)."
                    )


# --- vLLM's own transfers between GPUs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NCCL:
    """Broadcast from the trainer's GPU to those of the workers, which may be on other machines.

    num_workers     of the engine, over all of its replicas: tensor x pipeline x data parallel
    master_address  of this process, as the workers reach it
    master_port     None: a free one
    packed          many tensors per broadcast
    """

    num_workers: int = 1
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    packed: bool = True

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"NCCL: num_workers must be at least 1: got {self.num_workers}.")

    def connect(self, call: CallWorkers) -> Transfer:
        def info() -> Any:
            port = self.master_port
            if port is None:
                port = vllm_module("vllm.utils.network_utils").get_open_port()
            return vllm_module("vllm.distributed.weight_transfer.nccl_engine").NCCLTrainerInitInfo(
                rank=0,
                master_address=self.master_address,
                master_port=port,
                world_size=1 + self.num_workers,
                packed=self.packed,
            )

        return _GPUTransfer(call, "nccl", info)


@dataclass(frozen=True)
class CudaIPC:
    """Handles of GPU memory: trainer and worker share a GPU.

    packed        through one buffer of ``buffer_bytes``, so that the trainer holds no second copy of the model
    """

    packed: bool = True
    buffer_bytes: int = 1 << 30

    def connect(self, call: CallWorkers) -> Transfer:
        def info() -> Any:
            return vllm_module("vllm.distributed.weight_transfer.ipc_engine").IPCTrainerInitInfo(
                rank=0, packed=self.packed, packed_buffer_size_bytes=self.buffer_bytes
            )

        return _GPUTransfer(call, "ipc", info)


class _GPUTransfer:
    """A trainer's end of one of vLLM's transfers, opened at the first update. Not yet run on a GPU.

    Its last four methods are vLLM's ``VLLMWeightSyncClient``, through which vLLM calls the workers.
    """

    def __init__(self, call: CallWorkers, backend: str, make_info: Callable[[], Any]) -> None:
        self._call, self._backend, self._make_info = call, backend, make_info
        self._source: Any = None
        self._trainer: Any = None
        self._end = time.monotonic()
        self._touched = False

    def send(self, weights: WeightSet, end: float) -> None:
        self._end, self._touched = end, False
        try:
            if self._trainer is None:
                self._open()
            self._source.weights = weights
            self._trainer.send_weights()
        except Exception as error:
            if self._touched or isinstance(error, NotImplementedError):
                raise
            raise NothingLoadedError(f"{error} Nothing was updated.") from error
        finally:
            if self._source is not None:
                self._source.weights = None

    def _open(self) -> None:
        factory = vllm_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"VLLMEngine: the {self._backend} transfer moves weights between GPUs, and there is none here; "
                "backend='shared_memory' needs none. Nothing was updated."
            )
        self._source = _source_class()()
        self._trainer = factory.trainer_init(self._make_info(), client=self, source=self._source)

    def close(self) -> None:
        if self._trainer is not None:
            with suppress(Exception):  # the peers may be gone
                self._trainer.shutdown()
            self._trainer = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("llmrl_open_transfer", self._end, backend=self._backend, init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("llmrl_start", self._end)

    def update_weights(self, update_info: Any) -> None:
        self._touched = True
        self._call("update_weights", self._end, update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # the engine labels it
        self._call("finish_weight_update", self._end)


@cache
def _source_class() -> type:
    base = vllm_module("vllm.distributed.weight_transfer.base")

    class Source(base.WeightSource):
        """The weights of the update that runs."""

        weights: WeightSet

        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in self.weights.metadata.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights.pairs():
                yield name, tensor.cuda()

    return Source


_NAMED: dict[str, TransferSettings] = {"shared_memory": SharedMemory(), "nccl": NCCL(), "ipc": CudaIPC()}
# Weights of an engine in this process are handed over as tensors; HTTP cannot carry handles of GPU memory.
_REFUSED: dict[str, tuple[type, ...]] = {"process": (SharedMemory, NCCL, CudaIPC), "server": (CudaIPC,)}


def transfer_settings(given: str | TransferSettings | None, place: str = "subprocess") -> TransferSettings | None:
    """The settings that a name stands for, or those given.

    Raises  ConfigError for an unknown name, and for a transfer that an engine in ``place`` (of `CoreInfo`) cannot use
    """
    if isinstance(given, str) and given not in _NAMED:
        raise ConfigError(
            f"VLLMEngine: weight_backend must be one of {', '.join(_NAMED)}: got {given!r}."
            f"{did_you_mean(given, _NAMED)}"
        )
    settings = _NAMED[given] if isinstance(given, str) else given
    if isinstance(settings, _REFUSED.get(place, ())):
        remedy = "leave weight_backend out" if place == "process" else "use SharedMemory or NCCL"
        where = "in this process" if place == "process" else "behind a URL"
        raise ConfigError(f"VLLMEngine: {type(settings).__name__} does not reach an engine {where}: {remedy}.")
    return settings
