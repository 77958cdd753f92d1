"""`Categorical`: a choice among n, written as its number, some of them forbidden by a mask where there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Size, Tensor

from llmrl.data.specs.base import LeafSpec
from llmrl.data.specs.numeric import choices
from llmrl.data.specs.shape import unexpanded
from llmrl.errors import ConfigError, ShapeError

__all__ = ["Categorical"]


class Categorical(LeafSpec):
    """The integers 0 to n-1, where ``mask`` (bool, broadcasting to shape + [n]) allows them.

    Raises  ConfigError for n below 1, or a mask that allows nothing somewhere; ShapeError for a mask that does not fit

    >>> spec = Categorical(4, shape=(2,), mask=torch.tensor([True, False, False, True]))
    >>> spec.project(torch.tensor([1, 2])), spec.expand(5, 2).mask.shape
    (tensor([0, 3]), torch.Size([5, 2, 4]))
    """

    _fields: ClassVar[dict[str, int]] = {"_mask": 1}

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int = (),
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ):
        if n < 1:
            raise ConfigError(f"Categorical: n counts choices and must be at least 1: got {n}.")
        super().__init__(shape, device, dtype)
        self.n = n
        self._mask = None
        if mask is not None:
            self.update_mask(mask)

    def update_mask(self, mask: Tensor | None) -> None:
        """Sets the mask, in place; None allows everything."""
        if mask is None:
            self._mask = None
            return
        missing = len(self.shape) + 1 - mask.ndim
        sizes = (1,) * max(missing, 0) + tuple(mask.shape)
        wanted = (*self.shape, self.n)
        if (
            missing < 0
            or sizes[-1] != self.n
            or any(got not in (1, size) for got, size in zip(sizes, wanted, strict=True))
        ):
            raise ShapeError(f"Categorical: mask must broadcast to shape + [n], {wanted}: got {tuple(mask.shape)}.")
        if mask.dtype != torch.bool or not bool(mask.any(-1).all()):
            got = mask.dtype if mask.dtype != torch.bool else "an entry where none of them is"
            raise ConfigError(f"Categorical: mask must be bool with at least one choice allowed everywhere: got {got}.")
        self._mask = unexpanded(mask.reshape(sizes).to(self.device), self.shape, "Categorical").clone()

    @property
    def mask(self) -> Tensor | None:
        """The mask at shape + [n]: a view, size 1 where the spec has any size."""
        return None if self._mask is None else self._expanded("_mask")

    def cardinality(self) -> int | float:
        return math.inf if -1 in self.shape else self._count(use_mask=True)

    def to_categorical_spec(self) -> Categorical:
        return self

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        device = self.device if generator is None else generator.device
        if self._mask is None:
            return torch.randint(self.n, shape, generator=generator, device=device)
        # The highest of n uniform keys, where only allowed choices have one: every allowed choice is as likely.
        keys = torch.rand((*shape, self.n), generator=generator, device=device)
        return keys.masked_fill(~self._mask.to(device), -1.0).argmax(-1)

    def _outside(self, value: Tensor) -> Tensor:
        number = value if value.is_floating_point() else value.long()
        outside = ~((number >= 0) & (number < self.n))
        if value.is_floating_point():
            outside |= value != value.round()
        if self._mask is not None:
            safe = torch.where(outside, torch.zeros_like(number), number).long()
            mask = self._mask.to(value.device).expand((*value.shape, self.n))
            outside |= ~mask.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        return outside

    def _nearest(self, value: Tensor) -> Tensor:
        number = value.nan_to_num(0.0).round() if value.is_floating_point() else value.long()
        number = number.clamp(0, self.n - 1).long()
        if self._mask is not None:
            choices = torch.arange(self.n, device=value.device)
            distance = (choices - number.unsqueeze(-1)).abs()
            number = distance.masked_fill(~self._mask.to(value.device), self.n).argmin(-1)
        return number.to(value.dtype)

    def _domain_text(self) -> str:
        return f"one of 0 to {self.n - 1}" + ("" if self._mask is None else " that the mask allows")

    def _count(self, use_mask: bool) -> int | float:
        if self._mask is None or not use_mask:
            return self.n ** self._full_shape(()).numel()
        return math.prod(self.mask.sum(-1).flatten().tolist())

    def _enumerate(self, use_mask: bool) -> Tensor:
        numel = self.shape.numel()
        if self._mask is None or not use_mask:
            ranges = [torch.arange(self.n)] * numel
        else:
            ranges = [row.nonzero().squeeze(-1).cpu() for row in self.mask.reshape(numel, self.n)]
        return choices(ranges, self.shape).to(self.device)

    def _identity(self) -> tuple[object, ...]:
        return (*super()._identity(), self.n)
