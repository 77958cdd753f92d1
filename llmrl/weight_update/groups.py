"""A model's weights, whole, a group at a time: the trainer never holds a second copy of the model.

Where parameters are sharded (FSDP2) each group is gathered when it is asked for, and freed when the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from llmrl.errors import ConfigError


@dataclass(frozen=True)
class LazyWeight:
    """A weight that is made on demand: ``make`` returns it, as often as it is called."""

    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class WeightGroups:
    """Named weights in groups of at most ``max_bytes``, a larger weight alone. Going through them again makes them
    again.

    ``metadata``  {name: (dtype, shape)} of all of them, known without making one

    Where making is a collective every rank must go through the groups in step: the one that sends through what it
    calls, the others by `drain`.

    >>> groups = weight_groups(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), max_bytes=40)
    >>> [list(group) for group in groups]
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    >>> groups.metadata["1.weight"]
    (torch.float32, torch.Size([1, 3]))
    """

    def __init__(self, weights: Mapping[str, LazyWeight], *, max_bytes: int = 1 << 28) -> None:
        if not max_bytes > 0:
            raise ConfigError(f"WeightGroups: max_bytes must be positive: got {max_bytes}.")
        self.weights, self._max_bytes = dict(weights), max_bytes
        self.metadata = {name: (weight.dtype, weight.shape) for name, weight in self.weights.items()}

    @torch.no_grad()
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        group: dict[str, Tensor] = {}
        size = 0
        for name, weight in self.weights.items():
            # The size is known before the weight is made, so that a group never exceeds its limit in memory.
            if group and size + weight.num_bytes > self._max_bytes:
                yield group
                group, size = {}, 0
            group[name] = weight.make()
            size += weight.num_bytes
        if group:
            yield group

    def drain(self) -> None:
        """Takes part in the collectives of ranks that use the weights."""
        for _ in self:
            pass


def weight_groups(model: nn.Module, *, max_bytes: int = 1 << 28) -> WeightGroups:
    """The weights of ``model`` by the names of its ``state_dict``; a tied weight under its first name alone."""
    weights: dict[str, LazyWeight] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            weights[name] = LazyWeight(value.dtype, value.shape, partial(whole, value))
    return WeightGroups(weights, max_bytes=max_bytes)


def whole(value: Tensor) -> Tensor:
    """The tensor without a graph; of a sharded one all of it, which is a collective."""
    value = value.detach()
    if not hasattr(value, "full_tensor"):
        return value
    return value.to(value.device_mesh.device_type).full_tensor()  # shards may wait in host memory
