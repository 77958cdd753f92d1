"""A model's full weights, one group at a time, so that the trainer never holds a second copy of the model.

If parameters are sharded (FSDP2) each group is gathered when it is requested, and freed when the next one is. Weights
for an engine of another precision are cast before they are gathered: fewer bytes, and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmrl.errors import ConfigError

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


class LazyWeight(NamedTuple):
    """A weight that is built on demand, in ``dtype``: every call of ``make`` with a dtype returns it."""

    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[torch.dtype], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def build(self) -> Tensor:
        return self.make(self.dtype)


class WeightGroups:
    """Named weights in groups of at most ``max_bytes``; a larger weight is a group of its own. Every iteration builds
    the weights again.

    ``metadata``  {name: (dtype, shape)} of all weights, available before any is built

    If building a weight is a collective, all ranks must iterate at the same time: the sending rank as it sends, the
    others by `drain`.

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

    def cast(self, dtype: torch.dtype | None, kept: Collection[str] = ()) -> WeightGroups:
        """The same weights in ``dtype`` (None: in their own), but for integers and those with a part of their name in
        ``kept``.
        """
        return WeightGroups(
            {
                name: weight._replace(dtype=sent_dtype(name, weight.dtype, dtype, kept))
                for name, weight in self.weights.items()
            },
            max_bytes=self._max_bytes,
        )

    @torch.no_grad()
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        group: dict[str, Tensor] = {}
        size = 0
        for name, weight in self.weights.items():
            # Checked before the weight is built, so that a group never exceeds its memory limit.
            if group and size + weight.num_bytes > self._max_bytes:
                yield group
                group, size = {}, 0
            group[name] = weight.build()
            size += weight.num_bytes
        if group:
            yield group

    @torch.no_grad()
    def built(self) -> dict[str, Tensor]:
        """All weights at once."""
        return {name: weight.build() for name, weight in self.weights.items()}

    def drain(self) -> None:
        """Takes part in the collectives of the rank that uses the weights."""
        for _ in self:
            pass


def weight_groups(model: nn.Module, *, max_bytes: int = 1 << 28) -> WeightGroups:
    """The weights of ``model`` under the names of its ``state_dict``; a tied weight only under its first name."""
    weights: dict[str, LazyWeight] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            weights[name] = LazyWeight(value.dtype, value.shape, partial(whole, value))
    return WeightGroups(weights, max_bytes=max_bytes)


def sent_dtype(name: str, own: torch.dtype, dtype: torch.dtype | None, kept: Collection[str] = ()) -> torch.dtype:
    """The dtype of a weight for an engine that computes in ``dtype``, but keeps names with a part in ``kept``."""
    return own if dtype is None or not own.is_floating_point or any(part in name for part in kept) else dtype


def whole(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The detached tensor, in ``dtype`` if given; a sharded one is gathered, which is a collective."""
    value, dtype = value.detach(), dtype or value.dtype
    if not hasattr(value, "full_tensor"):
        return value if value.dtype == dtype else value.to(dtype)
    # Shards may be offloaded to the CPU. Each rank casts its own: half of the bytes are gathered.
    return value.to(value.device_mesh.device_type).to(dtype).full_tensor()
