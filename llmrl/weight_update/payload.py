"""One set of weights in one contiguous buffer, packed once for all workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.errors import MissingKeyError, WeightSyncError
from llmrl.weight_update.buffers import padded_size
from llmrl.weight_update.target import ModelTarget

Layout = dict[str, tuple[torch.dtype, torch.Size, int]]  # name -> dtype, shape, offset of the first byte


@dataclass
class Payload:
    """Weights of one version.

    memory  uint8[N], all weights
    slot    the number of the shared block, if ``memory`` is one
    stored  a reference to the memory in an object store, if it was put there
    """

    version: int
    layout: Layout
    memory: Tensor
    slot: int | None = None
    stored: Any = None

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Views of the memory, by name."""
        found, typed = {}, {}
        for name, (dtype, shape, offset) in self.layout.items():
            if dtype not in typed:  # one view of all memory for each dtype: fewer calls than one for each tensor
                typed[dtype] = self.memory.view(dtype)
            found[name] = typed[dtype].narrow(0, offset // dtype.itemsize, shape.numel()).view(shape)
        return found

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copies tensors that have this layout into the memory."""
        if places := self.weights:
            torch._foreach_copy_(list(places.values()), [weights[name] for name in places])


def layout_of(weights: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """The layout of tensors in one buffer, and the buffer's size in bytes."""
    layout: Layout = {}
    size = 0
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise WeightSyncError(f"weights: {name!r} must be a tensor: got {type(tensor).__name__}. Nothing was sent.")
        layout[name] = (tensor.dtype, tensor.shape, size)
        size += padded_size(tensor.nbytes)
    return layout, size


def pack(weights: Mapping[str, Tensor], version: int) -> Payload:
    """A copy of the weights in private memory of this process."""
    layout, size = layout_of(weights)
    payload = Payload(version, layout, torch.empty(size, dtype=torch.uint8))
    payload.write(weights)
    return payload


class Slots:
    """Blocks of shared memory that a sender writes in turn, but never one that a worker may be reading.

    Two are enough while every worker takes every version; a worker that lags behind makes more necessary.

    registered     {model id: TensorDict} to write as well
    auto_register  False: weights of other model ids raise a KeyError
    """

    def __init__(self, registered: Mapping[str, TensorDictBase], auto_register: bool) -> None:
        self._registered, self._auto_register = registered, auto_register
        self._blocks: list[Payload] = []
        self._numbers = count()

    def write(self, model_id: str, weights: Mapping[str, Tensor], version: int, transports: Collection[Any]) -> Payload:
        """Copies the weights into a block that no worker of these `SharedMemTransport` objects may be reading."""
        if model_id in self._registered:
            ModelTarget(self._registered[model_id]).update_weights(weights, version=version)
        elif not self._auto_register:
            raise MissingKeyError(
                f"SharedMemWeightSyncScheme: with auto_register=False model {model_id!r} must be registered "
                f"(`register_shared_weights`): registered are {sorted(self._registered)}."
            )
        layout, size = layout_of(weights)
        self._blocks = [block for block in self._blocks if block.layout == layout]  # the others no longer fit
        busy = set().union(*(transport.busy for transport in transports))
        block = next((block for block in self._blocks if block.slot not in busy), None)
        if block is None:
            memory = torch.empty(size, dtype=torch.uint8).share_memory_()
            block = Payload(version, layout, memory, next(self._numbers))
            self._blocks.append(block)
        block.write(weights)
        block.version = version
        return block
