"""`Discrete`: entries that are whole numbers from 0, each below a count of its own, some of them forbidden by a mask.

It is the domain behind `Categorical`, `MultiCategorical` and `Binary`; one-hot vectors are another way to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Size, Tensor

from llmrl.data.specs.base import Device, Shape
from llmrl.data.specs.leaf import LeafSpec, cast, field_text
from llmrl.errors import ConfigError

__all__ = ["Binary", "Discrete"]


class Discrete(LeafSpec):
    """Whole numbers from 0 to a count: ``_width`` for all entries, or at most that in ``_counts`` (int64, a field).
    ``_mask`` (bool, a field with one dim more, of size ``_width``) is True where a number is allowed, and then has the
    counts in it too."""

    _fields: ClassVar[dict[str, int]] = {"_counts": 0, "_mask": 1}

    def __init__(self, width: int, shape: Sequence[int] | int, device: Device, dtype: torch.dtype):
        super().__init__(shape, device, dtype)
        self._width = width
        self._counts: Tensor | None = None
        self._mask: Tensor | None = None

    def _bound(self, device: torch.device) -> int | Tensor:
        return self._width if self._counts is None else self._counts.to(device)

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        if self._mask is None and self._counts is None:
            return torch.randint(self._width, shape, generator=generator, device=device)
        counts = self._bound(device) if self._mask is None else self._mask.to(device).sum(-1)
        drawn = torch.empty(shape, dtype=torch.int64, device=device)
        number = drawn.random_(0, torch.iinfo(torch.int64).max, generator=generator) % counts
        if self._mask is None:
            return number
        # The numbers that the mask allows, in order, then the others: the k-th allowed one is entry k.
        return _take((~self._mask.to(device)).to(torch.uint8).argsort(dim=-1, stable=True), number)

    def _outside(self, value: Tensor) -> Tensor:
        number = value if value.is_floating_point() else value.long()
        outside = ~((number >= 0) & (number < self._bound(value.device)))
        if value.is_floating_point():
            outside |= value != value.round()
        if self._mask is not None:
            safe = torch.where(outside, torch.zeros_like(number), number).long()
            outside |= ~_take(self._mask.to(value.device), safe)
        return outside

    def _nearest(self, value: Tensor) -> Tensor:
        highest = self._bound(value.device) - 1
        number = cast(value, torch.int64).clamp(min=0)
        number = torch.minimum(number, torch.as_tensor(highest, device=value.device))
        if self._mask is not None:
            number = _take(_nearest_allowed(self._mask.to(value.device)), number)
        return number.to(self.dtype)

    def _entry_values(self, use_mask: bool, field: Callable[[str], Tensor]) -> Sequence[range | Tensor] | None:
        if self._mask is not None and use_mask:
            return [row.nonzero().squeeze(-1) for row in field("_mask").reshape(-1, self._width)]
        return [range(self._width)] if self._counts is None else [range(n) for n in field("_counts").flatten().tolist()]

    def _domain_text(self) -> str:
        if self._counts is None:
            text = f"one of 0 to {self._width - 1}"
        else:
            text = f"from 0 to below {field_text(self._counts)}"
        return text if self._mask is None else f"{text} that the mask allows"

    def _identity(self) -> tuple[object, ...]:
        return (*super()._identity(), self._width)


class Binary(Discrete):
    """A vector of zeros and ones. Made from its length ``n``, or from a ``shape`` that ends with it.

    >>> spec = Binary(4)
    >>> spec.shape, spec.project(torch.tensor([0.2, 0.9, 7.0, -1.0]))
    (torch.Size([4]), tensor([0, 1, 1, 0], dtype=torch.int8))
    """

    def __init__(
        self, n: int | None = None, shape: Shape = None, device: Device = None, dtype: torch.dtype = torch.int8
    ):
        if n is None and shape is None:
            raise ConfigError("Binary: needs n, the length of the vector, or a shape that ends with it.")
        super().__init__(2, (n,) if shape is None else shape, device, dtype)
        if n is not None and (not self.shape or self.shape[-1] not in (n, -1)):
            raise ConfigError(f"Binary: shape must end with n: got n={n}, shape {tuple(self.shape)}.")

    @property
    def n(self) -> int | None:
        """The length of the vector; None for a single entry."""
        return self.shape[-1] if self.shape else None


def _take(table: Tensor, number: Tensor) -> Tensor:
    """``table[..., number]``, entry by entry, for a table that broadcasts to ``number`` but for its last dim."""
    return table.expand((*number.shape, table.shape[-1])).gather(-1, number.unsqueeze(-1)).squeeze(-1)


def _nearest_allowed(mask: Tensor) -> Tensor:
    # For every number the allowed one that is nearest to it, the lower if two are as near.
    width = mask.shape[-1]
    numbers = torch.arange(width, device=mask.device)
    below = torch.where(mask, numbers, -2 * width).cummax(-1).values
    above = torch.where(mask, numbers, 3 * width).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(numbers - below <= above - numbers, below, above)
