"""A process group beside the default one, through vLLM: for a trainer and the workers of an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmrl.errors import ConfigError
from llmrl.optional import require

__all__ = ["stateless_init_process_group"]


def stateless_init_process_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    device: torch.device | str | int | None = None,
) -> Any:
    """Joins a group of ``world_size`` that knows nothing of ``torch.distributed``; waits until all have.

    Returns  on a GPU vLLM's NCCL communicator; where ``device`` is None or the CPU, a group with the same ``broadcast``
             that goes through the store at ``master_address``: for small things
    Raises   ConfigError for a rank outside of the group
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"stateless_init_process_group: rank must be within 0..{world_size - 1}: got {rank}.")
    if device is None or torch.device(device).type == "cpu":
        groups = require("vllm.distributed.utils", extra="vllm", used_by="stateless_init_process_group")
        group = groups.StatelessProcessGroup.create(master_address, master_port, rank, world_size)
        return _StoreGroup(group)
    nccl = require("vllm.distributed.weight_transfer.nccl_common", extra="vllm", used_by="stateless_init_process_group")
    return nccl.stateless_init_process_group(master_address, master_port, rank, world_size, device)


class _StoreGroup:
    """vLLM's group of metadata, with ``broadcast`` in place like that of a communicator."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.world_size = group.rank, group.world_size

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Every rank has the tensor of ``src`` afterwards."""
        found = self._group.broadcast(tensor, src=src)
        if self.rank != src:
            tensor.copy_(found)
