"""Weight transfer by broadcast: process groups of a trainer and an engine's workers, with a buffer on each member."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from llmrl.errors import ConfigError
from llmrl.optional import require
from llmrl.weight_update.buffers import Buffer


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: torch.device | str | int | None = None
) -> Any:
    """Joins a group of ``world_size`` ranks, a trainer and an engine's workers, separate from the default group of
    ``torch.distributed``; waits until all have joined.

    Returns  on a GPU vLLM's NCCL communicator; if ``device`` is None or the CPU, a group with the same ``broadcast``
             that goes through the store at ``master_address``, suitable for small tensors
    Raises   ConfigError for a rank outside the group
    """
    who = "stateless_init_process_group"
    if not 0 <= rank < world_size:
        raise ConfigError(f"{who}: rank must be within 0..{world_size - 1}: got {rank}.")
    if device is None or torch.device(device).type == "cpu":
        groups = require("vllm.distributed.utils", extra="vllm", used_by=who)
        return _StoreGroup(groups.StatelessProcessGroup.create(master_address, master_port, rank, world_size))
    nccl = require("vllm.distributed.weight_transfer.nccl_common", extra="vllm", used_by=who)
    return nccl.stateless_init_process_group(master_address, master_port, rank, world_size, device)


class _StoreGroup:
    """vLLM's metadata group, with an in-place ``broadcast`` like that of its NCCL communicator."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.world_size = group.rank, group.world_size

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrites ``tensor`` on every rank with that of ``src``."""
        found = self._group.broadcast(tensor, src=src)
        if self.rank != src:
            tensor.copy_(found)


class BroadcastBuffer(Buffer):
    """A buffer on each member of a group, on its own device: the trainer is rank 0, the workers follow."""

    def __init__(self, size: int, device: Any, address: str, port: int, world_size: int) -> None:
        super().__init__(torch.empty(size, dtype=torch.uint8, device=device))
        self._address, self._port, self._world_size = address, port, world_size
        self._group: Any = None

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
        """Broadcasts the trainer's bytes; every member calls it."""
        if end > start:
            self._group.broadcast(self.bytes[start:end], src=0)
