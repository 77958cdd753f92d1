"""A choice among n, optionally masked, written as its number or as a one-hot vector; each converts into the other.

`Categorical` and `MultiCategorical` are numbers, whose domain is `Discrete`'s. `OneHot` and `MultiOneHot` hold the spec
of their numbers and ask it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.data.specs.discrete import Discrete
from llmrl.data.specs.leaf import LeafSpec
from llmrl.data.specs.shape import ShapeOp, as_size, unexpanded
from llmrl.errors import ConfigError, DataError, ShapeError

__all__ = ["Categorical", "MultiCategorical", "MultiOneHot", "OneHot"]


class _Numbers(Discrete):
    # Base of the two specs of numbers, which are their own categorical form.

    @abc.abstractmethod
    def to_one_hot_spec(self) -> _OneHots: ...

    @abc.abstractmethod
    def _grouped(self, mask: Tensor) -> Tensor:
        """A mask as the field that `Discrete` keeps. Raises  ShapeError if it does not fit"""

    def update_mask(self, mask: Tensor | None) -> None:
        """Sets the mask, in place; None allows everything."""
        if mask is None:
            self._mask = None
        else:
            self._set_mask(self._grouped(mask))

    def to_one_hot(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` as one-hot vectors; with ``safe`` it must be in the spec."""
        return self.to_one_hot_spec()._hot(self.to_categorical(value, safe))

    def to_categorical_spec(self) -> Self:
        return self

    def to_categorical(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` itself; with ``safe`` it must be in the spec."""
        if safe:
            self.assert_is_in(value)
        return value


class Categorical(_Numbers):
    """The integers 0 to n-1, where ``mask`` (bool, broadcasting to shape + [n]) allows them. With ``n=-1`` the number
    is not known yet: any choice `is_in`, and `set_provisional_n` comes before `rand`.

    Raises  ConfigError for n of 0 or below -1, or a mask that allows nothing somewhere; ShapeError for a mask that does
            not fit

    >>> spec = Categorical(4, shape=(2,), mask=torch.tensor([True, False, False, True]))
    >>> spec.project(torch.tensor([1, 2])), spec.expand(5, 2).mask.shape
    (tensor([0, 3]), torch.Size([5, 2, 4]))
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = (),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ):
        if n < 1 and n != -1:
            raise ConfigError(f"Categorical: n counts choices and must be at least 1, or -1 for not known: got {n}.")
        super().__init__(n, shape, device, dtype)
        self.n = n
        self.update_mask(mask)

    def _grouped(self, mask: Tensor) -> Tensor:
        if not mask.ndim or mask.shape[-1] != self.n:
            raise ShapeError(
                f"Categorical: mask must broadcast to shape + [n], {(*self.shape, self.n)}: got {tuple(mask.shape)}."
            )
        return mask

    @property
    def mask(self) -> Tensor | None:
        """The mask at shape + [n]: a view, size 1 where the spec has any size."""
        return None if self._mask is None else self._expanded("_mask")

    def set_provisional_n(self, n: int) -> None:
        """Sets the number of choices for now, in place, where ``n`` is -1."""
        if self.n != -1 or n < 1:
            raise ConfigError(f"Categorical.set_provisional_n: is for a spec with n=-1, and at least 1: got {n}.")
        self._width = n

    def to_one_hot_spec(self) -> OneHot:
        """The spec of the same choice written as a one-hot vector, mask included."""
        self._known()
        return OneHot(self._width, (*self.shape, self._width), self.device, mask=self.mask)

    def _known(self) -> None:
        if self._width == -1:
            raise ConfigError("Categorical: the number of choices is not known (n=-1); call set_provisional_n first.")

    def _bound(self, device: torch.device) -> int:
        return torch.iinfo(torch.int64).max if self._width == -1 else self._width

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        self._known()
        return super()._sample(shape, generator, device)

    def _count(self, use_mask: bool) -> int | float:
        return float("inf") if self._width == -1 else super()._count(use_mask)


class MultiCategorical(_Numbers):
    """One choice per group: the last dim has an entry for each, which is below its own number in ``nvec``.

    ``nvec`` may have leading dims, for numbers that differ from row to row. ``mask`` (bool, the groups one after the
    other in the last dim, as in `MultiOneHot`) says what is allowed. A single group without other dims has no dim of
    its own, unless ``remove_singleton`` is False.

    >>> spec = MultiCategorical([3, 5])
    >>> spec.is_in(torch.tensor([2, 4])), spec.is_in(torch.tensor([3, 4])), spec.cardinality()
    (True, False, 15)
    >>> MultiCategorical([3]).shape, MultiCategorical([3], remove_singleton=False).shape
    (torch.Size([]), torch.Size([1]))
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor | int,
        shape: Sequence[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
        remove_singleton: bool = True,
    ):
        nvec = torch.as_tensor(nvec, dtype=torch.int64)
        nvec = nvec if nvec.ndim else nvec.unsqueeze(0)
        if not nvec.numel() or bool((nvec < 1).any()):
            raise ConfigError(f"MultiCategorical: nvec counts choices and must be at least 1: got {nvec.tolist()}.")
        shape = as_size(shape, nvec.shape)
        if not shape or shape[-1] != nvec.shape[-1]:
            raise ShapeError(f"MultiCategorical: shape must end with the number of groups: got {shape}, nvec {nvec}.")
        if remove_singleton and shape == (1,):
            nvec, shape = nvec.reshape(()), ()
        super().__init__(int(nvec.max()), shape, device, dtype)
        self._counts = self._field(nvec, "_counts", "nvec")
        self.update_mask(mask)

    @property
    def nvec(self) -> Tensor:
        """The number of choices of every entry, int64 at the spec's shape: a view, size 1 where that is any size."""
        return self._expanded("_counts")

    def _grouped(self, mask: Tensor) -> Tensor:
        sizes = self._group_sizes()
        if not mask.ndim or mask.shape[-1] != sum(sizes):
            raise ShapeError(
                f"MultiCategorical: the last dim of mask must be the sum of the groups, {sum(sizes)}: got "
                f"{tuple(mask.shape)}."
            )
        mask = unexpanded(mask, mask.shape[:-1], "MultiCategorical")
        groups = [torch.nn.functional.pad(part, (0, self._width - part.shape[-1])) for part in mask.split(sizes, -1)]
        return torch.stack(groups, -2) if self.shape else groups[0]

    @property
    def mask(self) -> Tensor | None:
        """The mask with the groups one after the other in its last dim."""
        if self._mask is None:
            return None
        sizes, mask = self._group_sizes(), self._mask if self.shape else self._mask.unsqueeze(0)
        mask = mask.expand((*mask.shape[:-2], len(sizes), mask.shape[-1]))
        ends = torch.cat([mask[..., group, :size] for group, size in enumerate(sizes)], -1)
        return ends.expand((*self._full_shape(())[:-1], sum(sizes)))  # a view: the mask is stored unexpanded

    def split(self) -> tuple[Categorical, ...]:
        """One spec per group."""
        mask = None if self._mask is None else self._expanded("_mask")
        sizes = self._group_sizes()
        if not self.shape:
            return (Categorical(sizes[0], (), self.device, self.dtype, mask),)
        masks = [None if mask is None else mask[..., group, :size] for group, size in enumerate(sizes)]
        shape = self.shape[:-1]
        return tuple(
            Categorical(size, shape, self.device, self.dtype, part) for size, part in zip(sizes, masks, strict=True)
        )

    def to_one_hot_spec(self) -> MultiOneHot:
        """The spec of the same choices written as one-hot vectors, one after the other, mask included."""
        sizes = self._group_sizes()
        return MultiOneHot(sizes, (*self.shape[:-1], sum(sizes)), self.device, mask=self.mask)

    def to_one_hot(self, value: Tensor, safe: bool = True) -> Tensor:
        value = self.to_categorical(value, safe)
        return self.to_one_hot_spec()._hot(value if self.shape else value.unsqueeze(-1))

    def _group_sizes(self) -> list[int]:
        held = self._counts if self.shape else self._counts.unsqueeze(0)
        counts = held.expand((*held.shape[:-1], self.shape[-1] if self.shape else 1))
        if not counts.numel():
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
        if new._counts.numel():  # what is left may have fewer choices
            new._width = int(new._counts.max())
            new._mask = None if new._mask is None else new._mask[..., : new._width]
        return new


class _OneHots(LeafSpec):
    # One or more one-hot vectors in the last dim. `_numbers` is the spec of the choices themselves.

    _kept = 1

    def __init__(
        self,
        numbers: Categorical | MultiCategorical,
        groups: Sequence[int],
        shape: Sequence[int] | int | None,
        device: torch.device | str | int | None,
        dtype: torch.dtype,
    ):
        width = sum(groups)
        super().__init__((width,) if shape is None else shape, device, dtype)
        self.groups = tuple(groups)
        self._numbers = numbers

    def update_mask(self, mask: Tensor | None) -> None:
        """Sets the mask, in place; None allows everything."""
        numbers = self._numbers.clone()
        numbers.update_mask(mask)
        self._numbers = numbers

    @property
    def mask(self) -> Tensor | None:
        """The mask at the spec's shape: a view, size 1 where that is any size."""
        return self._numbers.mask

    def to_categorical_spec(self) -> Any:
        """The spec of the same choices written as numbers (int64), mask included."""
        return self._numbers.clone()

    def to_categorical(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` as the numbers of the choices, int64; with ``safe`` it must be in the spec."""
        if safe:
            self.assert_is_in(value)
        return self._argmax(value)

    def to_one_hot_spec(self) -> Self:
        return self

    def to_one_hot(self, value: Tensor, safe: bool = True) -> Tensor:
        """``value`` itself; with ``safe`` it must be in the spec."""
        if safe:
            self.assert_is_in(value)
        return value

    def _to_numpy(self, value: Tensor) -> np.ndarray:
        """The numbers of the choices as an array."""
        return self._argmax(value).cpu().numpy()

    def _encode(self, value: Any) -> Tensor:
        """Numbers of choices; or, as bools of the spec's shape, the vectors themselves."""
        given = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
        if given.dtype == torch.bool:
            return super()._encode(given)
        return self._hot(self._numbers.encode(given))

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        # A single choice has no dim for groups; several have one.
        return parts[0] if isinstance(self._numbers, Categorical) else torch.stack(list(parts), -1)

    def _hot(self, numbers: Tensor) -> Tensor:
        groups = [numbers] if isinstance(self._numbers, Categorical) else numbers.unbind(-1)
        parts = [
            torch.zeros((*part.shape, size), dtype=self.dtype, device=part.device).scatter_(-1, part.unsqueeze(-1), 1)
            for part, size in zip(groups, self.groups, strict=True)
        ]
        return torch.cat(parts, -1)

    def _argmax(self, value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            value = value.to(torch.uint8)
        return self._pack([part.argmax(-1) for part in value.split(self.groups, -1)])

    def _sample(self, shape: Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
        return self._hot(self._numbers.rand(shape[: len(shape) - len(self.shape)], generator=generator))

    def _invalid(self, value: Tensor) -> Tensor:
        # bool, one entry per choice: not exactly one 1 among zeros, or one that is masked
        bad = [
            ((part != 0) & (part != 1)).any(-1) | ((part != 0).sum(-1) != 1) for part in value.split(self.groups, -1)
        ]
        return self._pack(bad) | self._numbers._outside(self._argmax(value))

    def _outside(self, value: Tensor) -> Tensor:
        invalid = self._invalid(value)
        return invalid if isinstance(self._numbers, Categorical) else invalid.any(-1)

    def _nearest(self, value: Tensor) -> Tensor:
        # The nearest one-hot vector has its 1 where the value is largest among what is allowed; the lowest of several.
        scores = value.double().nan_to_num(0.0)
        if (mask := self._numbers.mask) is not None:
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
    """A choice among ``n`` as a vector with a single 1, in the last dim, which no shape operation may touch. ``mask``
    (bool, of the vector's shape) says what is allowed.

    With ``use_register``, `encode` takes any numbers or texts and gives each new one the next free place; `to_numpy`
    gives them back.

    >>> spec = OneHot(3)
    >>> spec.encode(2), spec.project(torch.tensor([0.1, 0.7, 0.2])), spec.to_categorical_spec().n
    (tensor([False, False,  True]), tensor([False,  True, False]), 3)
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Tensor | None = None,
    ):
        lead = _lead(self, shape, n)
        super().__init__(Categorical(n, lead, device, mask=mask), (n,), shape, device, dtype)
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
            raise DataError(f"OneHot.to_numpy: place {numbers.max()} of the register holds nothing yet.")
        return np.asarray([self._register[number] for number in numbers.flatten()]).reshape(numbers.shape)

    def _encode(self, value: Any) -> Tensor:
        return super()._encode(value if self._register is None else self._places(np.asarray(value)))

    def _places(self, values: np.ndarray) -> np.ndarray:
        new = [value for value in dict.fromkeys(values.flatten().tolist()) if value not in self._register]
        if len(self._register) + len(new) > self.n:
            raise DataError(f"OneHot.encode: the register has {self.n} places and all are taken: got {new}.")
        self._register += new
        places = [self._register.index(value) for value in values.flatten().tolist()]
        return np.asarray(places, dtype=np.int64).reshape(values.shape)


class MultiOneHot(_OneHots):
    """One choice per group in ``nvec``, as one-hot vectors one after the other in the last dim, which no shape
    operation may touch. ``mask`` (bool, of that shape) says what is allowed. The numbers of a single group without
    other dims have no dim of their own, as those of `MultiCategorical`.

    >>> spec = MultiOneHot([2, 3])
    >>> spec.encode([1, 0]).int(), [part.n for part in spec.split()]
    (tensor([0, 1, 1, 0, 0], dtype=torch.int32), [2, 3])
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor,
        shape: Sequence[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ):
        groups = [int(size) for size in nvec]
        lead = _lead(self, shape, sum(groups))
        numbers = MultiCategorical(groups, (*lead, len(groups)), device, mask=mask, remove_singleton=False)
        super().__init__(numbers, groups, shape, device, dtype)

    @property
    def nvec(self) -> tuple[int, ...]:
        """The number of choices of each group."""
        return self.groups

    def to_categorical_spec(self) -> MultiCategorical:
        return self._without_singleton(super().to_categorical_spec())

    def to_categorical(self, value: Tensor, safe: bool = True) -> Tensor:
        return self._without_singleton(super().to_categorical(value, safe))

    def _without_singleton(self, numbers: Any) -> Any:
        return numbers.squeeze(-1) if len(self.groups) == len(self.shape) == 1 else numbers

    def split(self) -> tuple[OneHot, ...]:
        """One spec per group."""
        specs = [numbers.to_one_hot_spec() for numbers in self._numbers.split()]
        return tuple(spec.to(self.dtype) for spec in specs)


def _lead(spec: _OneHots, shape: Sequence[int] | int | None, width: int) -> tuple[int, ...]:
    shape = as_size(shape, (width,))
    if not shape or shape[-1] != width:
        raise ShapeError(f"{type(spec).__name__}: the last dim must be the number of choices, {width}: got {shape}.")
    return shape[:-1]
