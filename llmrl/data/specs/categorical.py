"""A choice among n, optionally masked, as a number or as a one-hot vector; each spec converts into the other.

`Categorical` and `MultiCategorical` are numbers, with the domain of `Discrete`. `OneHot` and `MultiOneHot` store the
spec of their numbers and delegate to it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.data.specs.base import Device, Shape
from llmrl.data.specs.leaf import LeafSpec
from llmrl.data.specs.numeric import Discrete
from llmrl.data.specs.shape import ShapeOp, as_size, unexpanded
from llmrl.errors import ConfigError, DataError, ShapeError


class _Choices(LeafSpec):
    # Converts a spec and its values between numbers and one-hot vectors; by default returns them unchanged.

    def to_categorical_spec(self) -> Any:
        """The spec of the same choices as numbers, with the same mask."""
        return self

    def to_one_hot_spec(self) -> Any:
        """The spec of the same choices as one-hot vectors (several groups: concatenated), with the same mask."""
        return self

    def to_categorical(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` as the numbers of the choices; with ``safe`` it must be in the spec."""
        if safe:
            self.assert_is_in(value)
        return self._numbered(value)

    def to_one_hot(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` as one-hot vectors; with ``safe`` it must be in the spec."""
        if safe:
            self.assert_is_in(value)
        return self._vectors(value)

    def _numbered(self, value: Tensor) -> Tensor:
        return value

    def _vectors(self, value: Tensor) -> Tensor:
        return value


class _Numbers(Discrete, _Choices):
    # Choices as numbers: a single one, or one per group in the last dim.

    @property
    @abc.abstractmethod
    def _grouped(self) -> bool:
        """True if the last dim has an entry for each group."""

    @abc.abstractmethod
    def _group_sizes(self) -> list[int]:
        """The number of choices of each group."""

    @property
    def mask(self) -> Tensor | None:
        """The mask in one-hot form, as a view: the spec's dims (size 1 for -1), then the groups concatenated."""
        if self._mask is None:
            return None
        sizes, mask = self._group_sizes(), self._mask if self._grouped else self._mask.unsqueeze(-2)
        mask = mask.expand((*mask.shape[:-2], len(sizes), mask.shape[-1]))
        parts = torch.cat([mask[..., group, :size] for group, size in enumerate(sizes)], -1)
        lead = self._full_shape(())[: len(self.shape) - self._grouped]
        return parts.expand((*lead, sum(sizes)))  # a view: the mask is stored unexpanded

    def update_mask(self, mask: Tensor | None) -> None:
        """Sets the mask in place; None allows every choice."""
        if mask is None:
            self._mask = None
            return
        owner, sizes = type(self).__name__, self._group_sizes()
        if not mask.ndim or mask.shape[-1] != sum(sizes):
            raise ShapeError(
                f"{owner}: the last dim of mask must be the number of choices, {sum(sizes)}: got {tuple(mask.shape)}."
            )
        rows = unexpanded(mask, mask.shape[:-1], owner)  # avoids copying an expanded mask row by row
        # The groups share one tensor [..., groups, width], each padded with False to the widest.
        parts = [torch.nn.functional.pad(part, (0, self._width - part.shape[-1])) for part in rows.split(sizes, -1)]
        field = self._field(torch.stack(parts, -2) if self._grouped else parts[0], "_mask", "mask")
        if mask.dtype != torch.bool or not bool(field.any(-1).all()):
            got = mask.dtype if mask.dtype != torch.bool else "an entry that allows none"
            raise ConfigError(f"{owner}: mask must be bool and allow at least one choice everywhere: got {got}.")
        self._mask = field

    def _vectors(self, value: Tensor) -> Tensor:
        return self._hot(value, self._group_sizes(), torch.bool)

    def _hot(self, value: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        parts = [
            torch.zeros((*part.shape, size), dtype=dtype, device=part.device).scatter_(-1, part.unsqueeze(-1), 1)
            for part, size in zip(value.unbind(-1) if self._grouped else (value,), sizes, strict=True)
        ]
        return torch.cat(parts, -1)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), -1) if self._grouped else parts[0]


class Categorical(_Numbers):
    """The integers 0 to n-1 that ``mask`` (bool, broadcast to shape + [n]) allows. With ``n=-1`` the number of choices
    is not known yet: any choice `is_in`, and `rand` requires `set_provisional_n` first.

    Raises  ConfigError for n of 0 or below -1, or if the mask allows nothing for some entry; ShapeError if the mask
            does not fit

    >>> spec = Categorical(4, shape=(2,), mask=torch.tensor([True, False, False, True]))
    >>> spec.project(torch.tensor([1, 2])), spec.expand(5, 2).mask.shape
    (tensor([0, 3]), torch.Size([5, 2, 4]))
    """

    _grouped = False

    def __init__(
        self,
        n: int,
        shape: Shape = (),
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ):
        if n < 1 and n != -1:
            raise ConfigError(f"Categorical: n must be the number of choices, at least 1, or -1 (unknown): got {n}.")
        super().__init__(n, shape, device, dtype)
        self.n = n
        self.update_mask(mask)

    def set_provisional_n(self, n: int) -> None:
        """Sets a provisional number of choices, in place. Raises ConfigError unless the spec has n=-1."""
        if self.n != -1 or n < 1:
            raise ConfigError(f"Categorical.set_provisional_n: only for a spec with n=-1; must be at least 1: got {n}.")
        self._width = n

    def to_one_hot_spec(self) -> OneHot:
        (n,) = self._group_sizes()
        return OneHot(n, (*self.shape, n), self.device, mask=self.mask)

    def _group_sizes(self) -> list[int]:
        if self._width == -1:
            raise ConfigError("Categorical: the number of choices is not known (n=-1); call set_provisional_n first.")
        return [self._width]

    def _bound(self, device: torch.device) -> int:
        return torch.iinfo(torch.int64).max if self._width == -1 else self._width

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        self._group_sizes()  # raises if the number is not known
        return super()._sample(shape, generator, device)

    def _entry_values(self, use_mask: bool, field: Callable[[str], Tensor]) -> Sequence[range | Tensor] | None:
        return None if self._width == -1 else super()._entry_values(use_mask, field)


class MultiCategorical(_Numbers):
    """One choice per group: entry i of the last dim is at least 0 and below ``nvec[i]``.

    ``nvec`` may have leading dims if these numbers differ between rows. ``mask`` (bool, the groups concatenated in the
    last dim, as in `MultiOneHot`) is True where a choice is allowed. The shape of a single group without other dims is
    () rather than (1,), unless ``remove_singleton`` is False.

    >>> spec = MultiCategorical([3, 5])
    >>> spec.is_in(torch.tensor([2, 4])), spec.is_in(torch.tensor([3, 4])), spec.cardinality()
    (True, False, 15)
    >>> MultiCategorical([3]).shape, MultiCategorical([3], remove_singleton=False).shape
    (torch.Size([]), torch.Size([1]))
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor | int,
        shape: Shape = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
        remove_singleton: bool = True,
    ):
        nvec = torch.atleast_1d(torch.as_tensor(nvec, dtype=torch.int64))
        if not nvec.numel() or bool((nvec < 1).any()):
            raise ConfigError(f"MultiCategorical: nvec must hold counts of at least 1: got {nvec.tolist()}.")
        shape = as_size(nvec.shape if shape is None else shape)
        if not shape or shape[-1] != nvec.shape[-1]:
            raise ShapeError(f"MultiCategorical: shape must end with the number of groups: got {shape}, nvec {nvec}.")
        if remove_singleton and shape == (1,):
            nvec, shape = nvec.reshape(()), ()
        super().__init__(int(nvec.max()), shape, device, dtype)
        self._counts = self._field(nvec, "_counts", "nvec")
        self.update_mask(mask)

    @property
    def nvec(self) -> Tensor:
        """The number of choices per entry, int64, expanded to the spec's shape as a view; size 1 where that is -1."""
        return self._expanded("_counts")

    def split(self) -> tuple[Categorical, ...]:
        """One spec per group."""
        sizes, mask = self._group_sizes(), self.mask
        masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
        pairs = zip(sizes, masks, strict=True)
        return tuple(Categorical(size, self.shape[:-1], self.device, self.dtype, part) for size, part in pairs)

    def to_one_hot_spec(self) -> MultiOneHot:
        sizes = self._group_sizes()
        return MultiOneHot(sizes, (*self.shape[:-1], sum(sizes)), self.device, mask=self.mask)

    @property
    def _grouped(self) -> bool:
        return bool(self.shape)

    def _group_sizes(self) -> list[int]:
        if not self._grouped:
            return [int(self._counts)]
        counts = self._counts.expand((*self._counts.shape[:-1], self.shape[-1]))
        if not counts.numel():  # no rows: any number is valid
            return [self._width] * counts.shape[-1]
        rows = counts.reshape(-1, counts.shape[-1])
        if bool((rows != rows[0]).any()):
            raise ShapeError(
                f"MultiCategorical: masks, split and one-hot vectors need the same groups in every row: got nvec "
                f"{counts.tolist()}."
            )
        return rows[0].tolist()

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        new = super()._shaped(op, ndim)
        if new._counts.numel():  # the remaining entries may have fewer choices
            new._width = int(new._counts.max())
            new._mask = None if new._mask is None else new._mask[..., : new._width]
        return new


class _OneHots(_Choices):
    # One or more one-hot vectors in the last dim. `_numbers` is the spec of the choices themselves.

    _kept = 1

    _numbers: _Numbers

    def __init__(self, groups: Sequence[int], shape: Shape, device: Device, dtype: torch.dtype):
        self.groups, width = tuple(groups), sum(groups)
        super().__init__((width,) if shape is None else shape, device, dtype)
        if self.shape[-1:] != (width,):
            raise ShapeError(
                f"{type(self).__name__}: the last dim must be the number of choices, {width}: got {tuple(self.shape)}."
            )

    def update_mask(self, mask: Tensor | None) -> None:
        """Sets the mask in place; None allows every choice."""
        numbers = self._numbers.clone()  # copies of this spec share the old one and must keep its mask
        numbers.update_mask(mask)
        self._numbers = numbers

    @property
    def mask(self) -> Tensor | None:
        """The mask expanded to the spec's shape, as a view; size 1 where that is -1."""
        return self._numbers.mask

    def to_categorical_spec(self) -> Any:
        return self._numbers.clone()

    def _to_numpy(self, value: Tensor) -> np.ndarray:
        """The numbers of the choices as an array."""
        return self._argmax(value).cpu().numpy()

    def _encode(self, value: Any) -> Tensor:
        """Accepts numbers of choices, or one-hot vectors as bools of the spec's shape."""
        given = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
        if given.dtype == torch.bool:
            return super()._encode(given)
        return self._hot(self._numbers.encode(given))

    def _hot(self, numbers: Tensor) -> Tensor:
        return self._numbers._hot(numbers, self.groups, self.dtype)

    def _argmax(self, value: Tensor) -> Tensor:
        if value.dtype == torch.bool:  # torch has no argmax for bool
            value = value.to(torch.uint8)
        return self._numbers._joined([part.argmax(-1) for part in value.split(self.groups, -1)])

    _numbered = _argmax

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        return self._hot(self._numbers.rand(shape[: len(shape) - len(self.shape)], generator=generator))

    def _outside(self, value: Tensor) -> Tensor:
        # A group is valid only if it is a single 1 among zeros, at a position that the mask allows.
        parts = value.split(self.groups, -1)
        invalid = [((part != 0) & (part != 1)).any(-1) | ((part != 0).sum(-1) != 1) for part in parts]
        outside = self._numbers._joined(invalid) | self._numbers._outside(self._argmax(value))
        return outside.any(-1) if self._numbers._grouped else outside

    def _nearest(self, value: Tensor) -> Tensor:
        # The nearest one-hot vector has its 1 where the value is largest among allowed positions; the first on ties.
        scores = value.double().nan_to_num(0.0)
        if (mask := self.mask) is not None:
            scores = scores.masked_fill(~mask.to(value.device), -torch.inf)
        return self._hot(self._argmax(scores))

    def _count(self, use_mask: bool) -> int | float:
        return self._numbers._count(use_mask)

    def _enumerate(self, use_mask: bool) -> Tensor:
        return self._hot(self._numbers.enumerate(use_mask))

    def _domain_text(self) -> str:
        text = f"one-hot over {' + '.join(str(size) for size in self.groups)}"
        return text if self._numbers._mask is None else f"{text} that the mask allows"

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        new = super()._shaped(op, ndim)
        new._numbers = self._numbers._shaped(op, ndim)
        return new

    def _emptied(self, ndim: int) -> Self:
        new = super()._emptied(ndim)
        new.shape = Size((*new.shape[:-1], 0))
        return new

    def _to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        new = super()._to(dest)
        if not isinstance(dest, torch.dtype):
            new._numbers = self._numbers.to(dest)
        return new

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.groups, self._numbers)


class OneHot(_OneHots):
    """A choice among ``n`` as a vector with a single 1 in the last dim, which shape operations must not touch. ``mask``
    (bool, of the vector's shape) is True where a choice is allowed.

    With ``use_register``, `encode` accepts any numbers or strings and assigns each new one to the next free position;
    `to_numpy` returns the originals.

    >>> spec = OneHot(3)
    >>> spec.encode(2), spec.project(torch.tensor([0.1, 0.7, 0.2])), spec.to_categorical_spec().n
    (tensor([False, False,  True]), tensor([False,  True, False]), 3)
    """

    def __init__(
        self,
        n: int,
        shape: Shape = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Tensor | None = None,
    ):
        super().__init__((n,), shape, device, dtype)
        self._numbers = Categorical(n, self.shape[:-1], device, mask=mask)
        self._register: list[Any] | None = [] if use_register else None

    @property
    def n(self) -> int:
        """The number of choices."""
        return self.groups[0]

    def _to_numpy(self, value: Tensor) -> np.ndarray:
        numbers = super()._to_numpy(value)
        if self._register is None:
            return numbers
        if numbers.size and numbers.max() >= len(self._register):
            raise DataError(f"OneHot.to_numpy: position {numbers.max()} of the register is still empty.")
        return np.asarray([self._register[number] for number in numbers.flatten()]).reshape(numbers.shape)

    def _encode(self, value: Any) -> Tensor:
        if self._register is None:
            return super()._encode(value)
        values = np.asarray(value)
        # Counts all new values before adding any, so that an array that does not fit changes nothing.
        new = [one for one in dict.fromkeys(values.flatten().tolist()) if one not in self._register]
        if len(self._register) + len(new) > self.n:
            raise DataError(f"OneHot.encode: the register has {self.n} positions and cannot fit all: got {new}.")
        self._register += new
        places = [self._register.index(one) for one in values.flatten().tolist()]
        return super()._encode(np.asarray(places, dtype=np.int64).reshape(values.shape))


class MultiOneHot(_OneHots):
    """One choice per group in ``nvec``, as one-hot vectors concatenated in the last dim, which shape operations must
    not touch. ``mask`` (bool, of that shape) is True where a choice is allowed. As in `MultiCategorical`, the numbers
    of a single group without other dims have shape ().

    >>> spec = MultiOneHot([2, 3])
    >>> spec.encode([1, 0]).int(), [part.n for part in spec.split()]
    (tensor([0, 1, 1, 0, 0], dtype=torch.int32), [2, 3])
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor,
        shape: Shape = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ):
        super().__init__([int(size) for size in nvec], shape, device, dtype)
        shape = (*self.shape[:-1], len(self.groups))
        self._numbers = MultiCategorical(self.groups, shape, device, mask=mask, remove_singleton=False)

    @property
    def nvec(self) -> tuple[int, ...]:
        """The number of choices of each group."""
        return self.groups

    def to_categorical_spec(self) -> MultiCategorical:
        return self._without_singleton(super().to_categorical_spec())

    def _numbered(self, value: Tensor) -> Tensor:
        return self._without_singleton(self._argmax(value))

    def _without_singleton(self, numbers: Any) -> Any:
        return numbers.squeeze(-1) if len(self.groups) == len(self.shape) == 1 else numbers

    def split(self) -> tuple[OneHot, ...]:
        """One spec per group."""
        return tuple(numbers.to_one_hot_spec().to(self.dtype) for numbers in self._numbers.split())
