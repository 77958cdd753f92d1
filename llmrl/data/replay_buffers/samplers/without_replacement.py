"""Passes over the rows: each row once per pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.storages import Storage


class SamplerWithoutReplacement(Sampler):
    """Draws every row exactly once per pass, in random order (``shuffle=False``: in the order of positions).

    A pass is one permutation of the rows that were there when it began. Rows written meanwhile join the next pass: new
    positions are not in the permutation, and a position overwritten before it was drawn leaves it. The last batch of a
    pass holds what is left, or is dropped with ``drop_last``. State: permutation, place in it, generator.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__()
        self._drop_last = drop_last
        self.shuffle = shuffle
        self._remaining = torch.empty(0, dtype=torch.int64)  # what the current pass has still to draw, in order
        self._ran_out = False

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    @property
    def drop_last(self) -> bool:
        return self._drop_last

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        length = self._length(storage)
        if self._too_short(batch_size):
            self._remaining = torch.randperm(length, generator=self.generator) if self.shuffle else torch.arange(length)
            if self._too_short(batch_size):
                raise ValueError(
                    f"SamplerWithoutReplacement: with drop_last a batch must not be larger than the content: got "
                    f"batch_size={batch_size}, {length} rows."
                )
        index, self._remaining = self._remaining[:batch_size], self._remaining[batch_size:]
        self._ran_out = self._too_short(batch_size)
        return index.clone(), {}

    def add(self, index: int) -> None:
        if self._remaining.numel():
            self.extend(torch.tensor([index]))

    def extend(self, index: Tensor) -> None:
        if self._remaining.numel():
            self._remaining = self._remaining[~torch.isin(self._remaining, index)]
            self._ran_out = self._ran_out or not self._remaining.numel()

    def empty(self) -> None:
        self._remaining = self._remaining[:0]
        self._ran_out = False

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "remaining": self._remaining.clone(),
            "ran_out": self._ran_out,
            "drop_last": self._drop_last,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._remaining = state["remaining"].clone()
        self._ran_out = state["ran_out"]
        self._drop_last = state["drop_last"]
        self.shuffle = state["shuffle"]

    def _too_short(self, batch_size: int) -> bool:
        left = self._remaining.numel()
        return left < batch_size if self._drop_last else left == 0
