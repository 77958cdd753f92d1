"""Numeric domains: `Bounded` (low to high), `Unbounded` (any value of the dtype) and `Discrete` (0 to a count).

A `Bounded` or `Unbounded` is an instance of its ``...Continuous`` or ``...Discrete`` subclass, chosen by the dtype or
by ``domain``, just as `pathlib.Path` picks its subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.data.specs.base import Device, Shape
from llmrl.data.specs.leaf import LeafSpec, cast, field_text
from llmrl.errors import ConfigError

Domain = Literal["continuous", "discrete"]


class _Numeric(LeafSpec):
    # The dtype determines whether the domain is continuous, unless the caller passes ``domain``.

    _domain: ClassVar[Domain | None] = None

    @property
    def domain(self) -> Domain:
        return self._domain

    def _to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        new = super()._to(dest)
        if isinstance(dest, torch.dtype):
            if dest.is_floating_point != self.dtype.is_floating_point:
                new.__class__ = _flavour(self, "continuous" if dest.is_floating_point else "discrete")
            for name in self._fields:
                setattr(new, name, getattr(new, name).to(dest))
        return new

    def _settle(self, domain: Domain | None, dtype: torch.dtype | None) -> torch.dtype:
        """Sets the spec's subclass. Returns the dtype; None becomes int64 for a discrete domain, else the default
        float dtype."""
        own, fixed = type(self).__name__, self._domain
        if domain not in (None, "continuous", "discrete") or (fixed and domain and fixed != domain):
            raise ConfigError(f"{own}: domain must be {fixed or 'continuous or discrete'}: got {domain!r}.")
        domain = domain or fixed
        if dtype is None:
            dtype = torch.int64 if domain == "discrete" else torch.get_default_dtype()
        if domain is None:
            domain = "continuous" if dtype.is_floating_point or dtype.is_complex else "discrete"
        if type(self) in _FLAVOURS:  # subclasses, also those of users, keep their class
            self.__class__ = _flavour(self, domain)
        return dtype


class Bounded(_Numeric):
    """A box: ``low`` and ``high`` are numbers or tensors that broadcast to ``shape``; both are inclusive.

    Raises  ConfigError if a low exceeds its high or ``domain`` is unknown; ShapeError if bounds do not broadcast to
            ``shape``

    ``shape`` defaults to that of the bounds; ``dtype`` to that of tensor bounds, else float (int64 if ``domain`` is
    "discrete"). The bounds of a discrete domain are rounded inwards.

    >>> spec = Bounded(-1, 1, shape=(2,))
    >>> type(spec).__name__, spec.project(torch.tensor([0.5, 3.0]))
    ('BoundedContinuous', tensor([0.5000, 1.0000]))
    """

    _fields: ClassVar[dict[str, int]] = {"_low": 0, "_high": 0}

    def __init__(
        self,
        low: float | Tensor | Sequence[Any],
        high: float | Tensor | Sequence[Any],
        shape: Shape = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        domain: Domain | None = None,
    ):
        given = [bound.dtype for bound in (low, high) if isinstance(bound, Tensor)]
        if dtype is None and given:
            dtype = torch.promote_types(given[0], given[-1])
        dtype = self._settle(domain, dtype)
        low, high = (b if isinstance(b, Tensor) else torch.tensor(np.asarray(b)) for b in (low, high))
        if self.domain == "discrete":
            # Inwards, because rounding outwards would allow excluded values; torch cannot round booleans.
            low = low if low.dtype is torch.bool else low.ceil()
            high = high if high.dtype is torch.bool else high.floor()
        if shape is None:
            shape = torch.broadcast_shapes(low.shape, high.shape)
        super().__init__(shape, device, dtype)
        if not bool((low <= high.to(low.device)).all()):  # also catches NaN
            raise ConfigError(
                f"{type(self).__name__}: low must not exceed high: got low={low.tolist()}, high={high.tolist()}."
            )
        self._low, self._high = self._bound(low, "low"), self._bound(high, "high")

    @property
    def low(self) -> Tensor:
        """The lower bound expanded to the spec's shape, as a view; size 1 where the spec has -1."""
        return self._expanded("_low")

    @property
    def high(self) -> Tensor:
        """The upper bound expanded to the spec's shape, as a view; size 1 where the spec has -1."""
        return self._expanded("_high")

    def _entry_values(self, use_mask: bool, field: Callable[[str], Tensor]) -> Sequence[range] | None:
        if self.domain == "continuous":
            return None
        bounds = torch.broadcast_tensors(field("_low"), field("_high"))
        return [
            range(int(low), int(high) + 1) for low, high in zip(*(b.flatten().tolist() for b in bounds), strict=True)
        ]

    def _bound(self, bound: Tensor, name: str) -> Tensor:
        held = bound.to(self.dtype)
        if not self.dtype.is_floating_point and not bool((held.to(bound.dtype) == bound).all()):
            raise ConfigError(
                f"{type(self).__name__}: {name} must be a number that {self.dtype} can hold: got {bound.tolist()}."
            )
        return self._field(held, f"_{name}", name)

    def _outside(self, value: Tensor) -> Tensor:
        low, high = self._low.to(value.device), self._high.to(value.device)
        return ~((value >= low) & (value <= high))

    def _nearest(self, value: Tensor) -> Tensor:
        value = cast(value, self.dtype)
        if value.is_floating_point():
            value = torch.where(value.isnan(), torch.zeros_like(value), value)
            value = value.round() if self.domain == "discrete" else value
        return torch.minimum(torch.maximum(value, self._low.to(value.device)), self._high.to(value.device))

    def _domain_text(self) -> str:
        return f"within [{field_text(self._low)}, {field_text(self._high)}]"


class BoundedContinuous(Bounded):
    """A `Bounded` sampled uniformly between its bounds, with a normal tail towards an infinite bound."""

    _domain = "continuous"

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        dtype = self.dtype if self.dtype.is_floating_point else torch.float64
        low, high = self._low.to(device, dtype), self._high.to(device, dtype)
        unit = torch.rand(shape, generator=generator, dtype=dtype, device=device)
        value = low * (1 - unit) + high * unit  # high - low would overflow for bounds near the limits of the dtype
        if not bool(low.isfinite().all() and high.isfinite().all()):
            tail = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            value = torch.where(low.isfinite() & high.isinf(), low + tail.abs(), value)
            value = torch.where(low.isinf() & high.isfinite(), high - tail.abs(), value)
            value = torch.where(low.isinf() & high.isinf(), tail, value)
        return torch.minimum(torch.maximum(value, low), high)  # rounding can exceed a bound


class BoundedDiscrete(Bounded):
    """A `Bounded` of whole numbers, all equally likely."""

    _domain = "discrete"

    def _outside(self, value: Tensor) -> Tensor:
        outside = super()._outside(value)
        return outside | (value != value.round()) if value.is_floating_point() else outside

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        low, high = self._low.to(device, torch.int64), self._high.to(device, torch.int64)
        width = high - low + 1  # wraps to 0 or below if the domain has 2**63 numbers or more
        drawn = torch.empty(shape, dtype=torch.int64, device=device)
        # The remainder of a number below 2**63, because torch.randint does not accept a range per entry.
        value = low + drawn.random_(0, torch.iinfo(torch.int64).max, generator=generator) % width.clamp(min=1)
        if bool((width <= 0).any()):
            anything = drawn.random_(torch.iinfo(torch.int64).min, None, generator=generator)
            value = torch.where(width <= 0, torch.minimum(torch.maximum(anything, low), high), value)
        return value


class Unbounded(_Numeric):
    """Any value of the dtype.

    >>> Unbounded(shape=(3,), dtype=torch.int64).is_in(torch.tensor([1, 2, 3]))
    True
    """

    def __init__(
        self, shape: Shape = (1,), device: Device = None, dtype: torch.dtype | None = None, domain: Domain | None = None
    ):
        super().__init__((1,) if shape is None else shape, device, self._settle(domain, dtype))


class UnboundedContinuous(Unbounded):
    """An `Unbounded` drawn from the standard normal distribution."""

    _domain = "continuous"

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        dtype = self.dtype if self.dtype.is_floating_point or self.dtype.is_complex else torch.get_default_dtype()
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)


class UnboundedDiscrete(Unbounded):
    """An `Unbounded` drawn uniformly from every whole number of its dtype."""

    _domain = "discrete"

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        drawn = torch.empty(shape, dtype=torch.int64, device=device)
        if self.dtype == torch.bool or self.dtype.is_floating_point:
            return drawn.random_(0, 2, generator=generator)
        info = torch.iinfo(self.dtype)
        upper = None if info.max == torch.iinfo(torch.int64).max else info.max + 1  # exclusive; 2**63 is not an int64
        return drawn.random_(info.min, upper, generator=generator)


_FLAVOURS: dict[type, dict[str, type]] = {
    Bounded: {"continuous": BoundedContinuous, "discrete": BoundedDiscrete},
    Unbounded: {"continuous": UnboundedContinuous, "discrete": UnboundedDiscrete},
}


def _flavour(spec: _Numeric, domain: str) -> type:
    return _FLAVOURS[Bounded if isinstance(spec, Bounded) else Unbounded][domain]


class Discrete(LeafSpec):
    """The domain behind `Categorical`, `MultiCategorical` and `Binary`; one-hot specs encode it as vectors.

    Whole numbers from 0 to below a count: ``_width`` for all entries, or the field ``_counts`` (int64, at most
    ``_width``). The field ``_mask`` (bool, with an extra last dim of size ``_width``) is True where a number is
    allowed, and False beyond the counts."""

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
        # Sorts the numbers that the mask allows to the front, in order, so that entry k is the k-th allowed number.
        return _take((~self._mask.to(device)).to(torch.uint8).argsort(dim=-1, stable=True), number)

    def _outside(self, value: Tensor) -> Tensor:
        number = value if value.is_floating_point() else value.long()
        outside = ~((number >= 0) & (number < self._bound(value.device)))
        if value.is_floating_point():
            outside |= value != value.round()
        if self._mask is not None:
            safe = torch.where(outside, torch.zeros_like(number), number).long()  # the mask has no other entries
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
    """A vector of zeros and ones, given by its length ``n`` or by a ``shape`` that ends with it.

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
    """``table[..., number]``, entry by entry; all dims of ``table`` but the last broadcast to ``number``."""
    return table.expand((*number.shape, table.shape[-1])).gather(-1, number.unsqueeze(-1)).squeeze(-1)


def _nearest_allowed(mask: Tensor) -> Tensor:
    # For every number the nearest allowed one; the lower one if two are equally near.
    width = mask.shape[-1]
    numbers = torch.arange(width, device=mask.device)
    # The last allowed number at or before each one, and the first at or after it; if there is none, a number
    # farther away than any allowed one can be.
    below = torch.where(mask, numbers, -2 * width).cummax(-1).values
    above = torch.where(mask, numbers, 3 * width).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(numbers - below <= above - numbers, below, above)
