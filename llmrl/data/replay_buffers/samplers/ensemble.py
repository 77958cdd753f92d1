"""Several samplers as one: chooses the members that contribute to each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.replay_buffers.members import Members, by_member
from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.storages import StorageEnsemble

Drawn = TypeVar("Drawn")


class SamplerEnsemble(Members, Sampler):
    """Several samplers as one; chooses the members that contribute to each batch.

    For a batch of N rows, members are drawn ``num_buffer_sampled`` times (default: the number of members) with
    probabilities ``p`` (default: equal); each draw gives ``N / num_buffer_sampled`` rows. With ``sample_from_all``
    every member contributes to every batch. A pass ends when the pass of a member drawn for the batch ends.

    Raises: ValueError if the batch cannot be divided; RuntimeError, with nothing drawn, if a member that may be drawn
    has no rows, or fewer left than its part.

    >>> from llmrl.data.replay_buffers import RandomSampler, TensorStorage
    >>> storage = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(10, 15)))
    >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    >>> index, _ = sampler.sample(storage, 8)
    >>> index["buffer_ids"].tolist(), storage.get(index).shape
    ([[0, 0, 0, 0], [1, 1, 1, 1]], torch.Size([2, 4]))
    """

    _held_in = "samplers"

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.samplers = self._checked(samplers, Sampler)
        count = len(samplers)
        if sample_from_all and p is not None:
            raise TypeError("SamplerEnsemble: p and sample_from_all exclude each other: got both.")
        if sample_from_all and num_buffer_sampled not in (None, count):
            raise ValueError(
                f"SamplerEnsemble: sample_from_all draws from every one of {count} members: got num_buffer_sampled="
                f"{num_buffer_sampled}."
            )
        if num_buffer_sampled is not None and num_buffer_sampled < 1:
            raise ValueError(f"SamplerEnsemble: num_buffer_sampled must be at least 1: got {num_buffer_sampled}.")
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = count if num_buffer_sampled is None else num_buffer_sampled
        self.p = _probabilities(p, count)
        self._ran_out = False

    def of(self, where: Sequence[int]) -> SamplerEnsemble:
        """An ensemble of some of the samplers; their probabilities keep their proportions."""
        samplers = [self.samplers[number] for number in where]
        if self.sample_from_all:
            return SamplerEnsemble(*samplers, sample_from_all=True)
        return SamplerEnsemble(*samplers, p=self.p[list(where)])

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    def set_rng(self, generator: torch.Generator) -> None:
        """Sets one generator for the ensemble and all members."""
        super().set_rng(generator)
        for sampler in self.samplers:
            sampler.set_rng(self._random)

    def sample(self, storage: StorageEnsemble, batch_size: int) -> tuple[TensorDict, dict[Any, Any]]:
        """``buffer_ids`` and ``index``, int64[members drawn, rows of each]; the members' info is left out."""

        def draw(number: int, size: int) -> tuple[Tensor, Tensor]:
            index, _ = self.samplers[number].sample(storage.storages[number], size)
            return index, index

        parts = self.draw(storage, batch_size, draw)
        ids = [torch.full_like(index, number) for number, index in parts]
        stacked = torch.stack([index for _, index in parts])
        return TensorDict(buffer_ids=torch.stack(ids), index=stacked, batch_size=stacked.shape), {}

    def draw(
        self, storage: StorageEnsemble, batch_size: int, draw: Callable[[int, int], tuple[Tensor, Drawn]]
    ) -> list[tuple[int, Drawn]]:
        """Chooses members; ``draw(member, rows)`` returns the positions of its part and the value to return for it."""
        size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest or not size:
            raise ValueError(
                f"SamplerEnsemble: a batch is divided among the {self.num_buffer_sampled} members that are drawn for "
                f"it: got batch_size={batch_size}; give a multiple, or another num_buffer_sampled."
            )
        for number, member in enumerate(storage.storages):
            if self.p[number] and not len(member):
                raise RuntimeError(
                    f"SamplerEnsemble: every member that may be drawn must have rows: member {number} has none; write "
                    "to it, or give it the probability 0 by p."
                )
        # Atomic: if one member fails, the others must not be one draw ahead.
        before, marks = self.generator.get_state(), [sampler.bookmark() for sampler in self.samplers]
        try:
            parts, self._ran_out = [], False
            numbers: Any = range(len(self))
            if not self.sample_from_all:
                numbers = torch.multinomial(self.p, self.num_buffer_sampled, True, generator=self.generator).tolist()
            for number in numbers:
                index, drawn = draw(number, size)
                if len(index) != size:
                    raise RuntimeError(
                        f"SamplerEnsemble: every member gives {size} rows of a batch of {batch_size}: got {len(index)} "
                        f"from member {number} ({type(self.samplers[number]).__name__}); draw whole batches there "
                        "(drop_last=True, strict_length=True), or choose a batch_size that divides its rows."
                    )
                self._ran_out |= self.samplers[number].ran_out
                parts.append((number, drawn))
        except BaseException:
            for sampler, mark in zip(self.samplers, marks, strict=True):
                sampler.go_back(mark)
            self.generator.set_state(before)  # last, because the samplers may share this generator
            raise
        return parts

    def update_priority(self, index: TensorDictBase, priority: Tensor) -> None:
        for number, positions, values in by_member(index, priority):
            self.samplers[number].update_priority(positions, values)

    def state_dict(self) -> dict[str, Any]:
        samplers = [sampler.state_dict() for sampler in self.samplers]
        return {**super().state_dict(), "ran_out": self._ran_out, "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for sampler, part in self._pairs(state["samplers"]):
            sampler.load_state_dict(part)
        self._ran_out = state["ran_out"]
        super().load_state_dict(state)


def _probabilities(p: Sequence[float] | Tensor | None, count: int) -> Tensor:
    if p is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    given = torch.as_tensor(p, dtype=torch.float64)
    if given.shape != (count,) or not bool((given >= 0).all()) or not isfinite(float(given.sum())) or not given.sum():
        raise ValueError(
            f"SamplerEnsemble: p must be one non-negative number per member, not all of them 0: got {given.tolist()} "
            f"for {count} members."
        )
    return given / given.sum()
