"""Broadcasts from a trainer to workers that are not ranks of its run: a group of torch.distributed outside of the
default one, and a buffer on each of its members.

No wait is in a GPU's kernel: a member that has ended makes the others raise, and aborts what they run for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmrl.concurrency.environment import environment
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.weight_update.buffers import Buffer

_JOINED_S = 300.0  # for all members to join: workers may be compiling
_PASSED_S = 60.0  # for one broadcast, of at most a few gigabytes
_POLL_S = 1e-4


class BroadcastGroup:
    """This process's ``rank`` of ``world_size`` members, a trainer and workers; see `stateless_init_process_group`."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size = rank, world_size
        wait = timedelta(seconds=_JOINED_S)
        store = dist.TCPStore(address, port, world_size, rank == 0, timeout=wait)  # returns when all have joined
        self._store = dist.PrefixStore("llmrl/weights", store)
        self._backend: Any = (_nccl if device.type == "cuda" else _gloo)(self._store, rank, world_size)
        self._running: tuple[Any, Tensor] | None = None
        self.start(torch.zeros(1, device=device))  # connects the members now, all together
        self.finish()

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrites ``tensor`` on every rank with that of ``src``, which does not wait for the others."""
        self.start(tensor.clone() if self.rank == src else tensor, src)
        if self.rank != src:
            self.finish()

    def start(self, tensor: Tensor, src: int = 0) -> None:
        """Begins a broadcast, after the previous one. The tensor must not change before `finish`."""
        self.finish()
        if self._backend is None:
            raise WeightSyncError("weights: this group has ended: an earlier broadcast failed; open another one.")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = src, 0, True  # beside this GPU's current stream
        self._running = self._backend.broadcast([tensor], options), tensor

    def finish(self) -> None:
        """Waits for the broadcast that was started. Raises WeightSyncError if it fails, or not all take part in it."""
        if self._running is None:
            return
        work, _ = self._running
        end, problem = time.monotonic() + _PASSED_S, ""
        while not (done := work.is_completed()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        try:
            if done:
                work.wait()
        except RuntimeError as error:
            problem = str(error)
        if problem or not done:
            self.abort()
            raise WeightSyncError(
                f"weights: a broadcast must reach all {self.world_size} members of its group: rank {self.rank} got "
                f"{problem or f'nothing within {_PASSED_S:g} s'}; a worker has ended, or hangs."
            )
        self._running = None

    def abort(self) -> None:
        """Leaves the group; does not wait for a broadcast that hangs. The other members raise, at their deadline if
        nothing tells them earlier.
        """
        self._running = None
        left, self._backend = [self._backend], None
        with suppress(RuntimeError, AttributeError):
            left[0].abort()  # NCCL ends its kernel
        # gloo waits for its threads when it is freed.
        threading.Thread(target=left.clear, name="llmrl-weights-abort", daemon=True).start()


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: torch.device | str | int | None = None
) -> BroadcastGroup:
    """Joins a group of ``world_size`` ranks, a trainer and an engine's workers, separate from the default group of
    ``torch.distributed``; waits until all have joined. It uses NCCL if ``device`` is a GPU, else gloo.

    Raises   ConfigError for a rank outside the group
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"stateless_init_process_group: rank must be within 0..{world_size - 1}: got {rank}.")
    device = torch.device("cpu" if device is None else device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return BroadcastGroup(master_address, master_port, rank, world_size, device)


class BroadcastBuffer(Buffer):
    """A buffer on each member of a group, on its own device: the trainer is rank 0, the workers follow."""

    def __init__(self, size: int, device: Any, address: str, port: int, world_size: int) -> None:
        super().__init__(torch.empty(size, dtype=torch.uint8, device=device))
        self._address, self._port, self._world_size = address, port, world_size
        self._group: BroadcastGroup | None = None

    @classmethod
    def open(cls, size: int, device: Any, group: list[Any], rank: int) -> BroadcastBuffer:
        """A worker's end, which joins the group as ``rank``, counted from 1."""
        buffer = cls(size, device, *group)
        buffer._join(rank)
        return buffer

    def connect(self, open_workers: Callable[[dict[str, Any]], Any]) -> None:
        group = [self._address, self._port, self._world_size]
        with ThreadPoolExecutor(1, thread_name_prefix="llmrl-weights") as pool:  # all must join at the same time
            opening = pool.submit(open_workers, {"group": group, "size": self.size})
            self._join(0)
            opening.result()

    def _join(self, rank: int) -> None:
        device = self.bytes.device
        self._group = stateless_init_process_group(self._address, self._port, rank, self._world_size, device)

    def pass_on(self, start: int, end: int) -> None:
        """Broadcasts the trainer's bytes; every member calls it. The trainer does not wait for the workers."""
        assert self._group is not None
        if end > start:
            self._group.start(self.bytes[start:end])
            if self._group.rank:
                self._group.finish()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()


def _gloo(store: dist.Store, rank: int, world_size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_PASSED_S))


def _nccl(store: dist.Store, rank: int, world_size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # `finish` has its own
    # Errors are reported to the caller: by default the group's watchdog would end the process.
    with environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
