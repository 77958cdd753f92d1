"""The trainer's half of moving weights into the worker processes of a vLLM engine of this machine.

Which weights, under which names, and whether they are complete was decided before (``layout``). The workers' half is in
``shared_memory``; the transfers between GPUs are vLLM's own (``native``).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines.vllm.shared_memory import BACKEND
from llmrl.modules.llm.engines.vllm.shared_memory_buffer import Placed, SharedBlock, padded_size
from llmrl.modules.llm.engines.vllm.weight_spec import WeightSet

__all__ = [
    "CallWorkers",
    "NothingLoadedError",
    "Settings",
    "SharedMemory",
    "SharedMemoryTransfer",
    "Transfer",
    "Transfers",
]


class NothingLoadedError(WeightSyncError):
    """An update that failed before the first weight was loaded: the engine goes on with those that it has."""


class CallWorkers(Protocol):
    """Calls a function in every worker: the answer of each, by ``end`` (of `time.monotonic`) or an error."""

    def __call__(self, method: str, end: float, **arguments: Any) -> list[Any]: ...


class Transfer(Protocol):
    """A way for weights into an engine: connected once, kept with what it holds open until ``close``.

    ``send`` raises NothingLoadedError where the engine still has its old weights, another error where it may not.
    """

    def send(self, weights: WeightSet, end: float) -> None: ...

    def close(self) -> None: ...


class Settings(Protocol):
    """What a transfer is made from. Equal settings are the same transfer."""

    def connect(self, call: CallWorkers) -> Transfer: ...


class Transfers:
    """The transfer of one engine: kept from update to update, replaced where other settings are asked for, and after
    an error: the workers may be others by then.
    """

    def __init__(self, call: CallWorkers) -> None:
        self._call = call
        self._settings: Settings | None = None
        self._transfer: Transfer | None = None

    def send(self, weights: WeightSet, end: float, settings: Settings) -> None:
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


@dataclass(frozen=True)
class SharedMemory:
    """The transfer through memory that trainer and workers share: both on one machine, with or without GPUs.

    block_bytes  of shared memory, kept between updates; one half is loaded while the other is filled. Small is fast:
                 what was just written is still in the processor's cache. It grows to the largest tensor, and shrinks
                 to what the machine has to give

    >>> SharedMemory(block_bytes=100)
    Traceback (most recent call last):
        ...
    llmrl.errors.ConfigError: SharedMemory: block_bytes must be at least 128: got 100.
    """

    block_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        if self.block_bytes < 128:
            raise ConfigError(f"SharedMemory: block_bytes must be at least 128: got {self.block_bytes}.")

    def connect(self, call: CallWorkers) -> Transfer:
        return SharedMemoryTransfer(call, self.block_bytes)


class SharedMemoryTransfer:
    """Weights through one block: written once here, read once by every worker, with a checksum on both sides.

    No copy of the model stays anywhere: a tensor is in the block while it is loaded. Weights that fit into half of the
    block are all verified before the first one is loaded.
    """

    def __init__(self, call: CallWorkers, block_bytes: int) -> None:
        self._call, self._block_bytes = call, block_bytes
        self._block: SharedBlock | None = None
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
                    for placed in self._filled(weights):
                        self._verify(loading)
                        loading = pool.submit(self._call, "llmrl_receive", end, placed=placed) if placed else None
                finally:
                    self._verify(loading)
            self._prove(end)
        except Exception as error:
            if self._touched:
                raise
            raise NothingLoadedError(f"{error} Nothing was updated.") from error

    def close(self) -> None:
        """Lets go of the block; its memory is free once the workers have ended too, or have opened another one."""
        self._block = None

    # --- the block ----------------------------------------------------------------------------------------------------

    def _reserve(self, weights: WeightSet, end: float) -> None:
        """A block for these weights, mapped by every worker and by then without a name."""
        sizes = {name: padded_size(shape.numel() * dtype.itemsize) for name, (dtype, shape) in weights.metadata.items()}
        largest, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
        half = min(padded_size(self._block_bytes // 2), total)
        size = max(half if half == total else 2 * half, sizes[largest])
        if self._block is not None and self._block.size >= size:
            return
        self._block = None
        while True:
            try:
                block = SharedBlock.create(size)
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
            self._call("llmrl_open_transfer", end, backend=BACKEND, init_info={"path": block.path, "size": block.size})
        finally:
            block.unlink()
        self._block, self._half = block, half

    def _filled(self, weights: WeightSet) -> Iterator[list[Placed]]:
        """What was put into one half of the block after the other. Asked for the next, the one before the last is free
        again; asked after an empty one, all are.
        """
        assert self._block is not None
        placed: list[Placed] = []
        start = offset = 0
        for name, tensor in weights.pairs():
            size = padded_size(tensor.numel() * tensor.itemsize)
            if size > self._half:  # it has the block to itself
                yield placed
                yield []
                yield [self._block.write(name, tensor, offset=0)]
                yield []
                start, offset, placed = 0, 0, []
                continue
            if offset + size > self._half:
                yield placed
                start, offset, placed = self._half - start, 0, []
            placed.append(self._block.write(name, tensor, offset=start + offset))
            offset += size
        yield placed

    # --- the proof ----------------------------------------------------------------------------------------------------

    def _verify(self, loading: Future[list[list[str]]] | None) -> None:
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

    def _prove(self, end: float) -> None:
        """Ends the update. Raises where a worker's model does not have what was sent."""
        for worker, findings in enumerate(self._call("llmrl_finish", end)):
            for what, names in findings.items():
                if names:
                    raise WeightSyncError(
                        f"VLLMEngine: every parameter must have its new value: in worker {worker} {names[0]} {what} "
                        f"({len(names)} in all)."
                    )
