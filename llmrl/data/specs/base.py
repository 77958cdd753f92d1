"""`TensorSpec`, what every spec can do, and `LeafSpec`, what all specs of a single entry share.

A leaf class adds its domain in four methods (`_sample`, `_outside`, `_nearest`, `cardinality`) and names the tensors
that describe it in `_fields`; shapes, devices, checks, conversion and equality are written here, once. `Composite` is a
mapping of specs. The shape operations themselves are in `shape`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.data.specs import shape as algebra
from llmrl.data.specs.shape import ShapeOp, as_size
from llmrl.errors import ConfigError, DataError, ShapeError

__all__ = ["LeafSpec", "Mismatch", "TensorSpec"]

_ENUMERABLE = 1 << 24


class Mismatch(NamedTuple):
    """One way in which a value is not what a spec declares. ``key`` is () for a leaf checked on its own."""

    key: tuple[str, ...]
    kind: Literal["missing", "type", "dtype", "shape", "domain"]
    text: str

    @property
    def name(self) -> str:
        return repr(self.key[0] if len(self.key) == 1 else self.key) if self.key else "value"


class TensorSpec:
    """Shape, device, dtype and domain of an entry, or of several (`Composite`). Immutable but for `Composite`'s
    entries.

    A dim of -1 takes any size; `rand`, `zero` and `one` give it size 1. Shape operations are those of tensors, act on
    bounds and masks too, and raise ShapeError where a tensor of this shape would refuse them.
    """

    shape: Size
    dtype: torch.dtype | None

    @property
    def device(self) -> torch.device | None:
        raise TypeError(f"{type(self).__name__} must define device.")

    # -- values --------------------------------------------------------------------------------------------------------

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """A value drawn from the domain, of shape ``shape + self.shape``; always `is_in`."""
        raise TypeError(f"{type(self).__name__} must define rand.")

    def sample(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """`rand`."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Zeros of the right shape, dtype and device, in the domain or not."""
        raise TypeError(f"{type(self).__name__} must define zero.")

    def one(self, shape: Sequence[int] = ()) -> Any:
        """Ones of the right shape, dtype and device, in the domain or not."""
        raise TypeError(f"{type(self).__name__} must define one.")

    def zeros(self, shape: Sequence[int] = ()) -> Any:
        """`zero`."""
        return self.zero(shape)

    def ones(self, shape: Sequence[int] = ()) -> Any:
        """`one`."""
        return self.one(shape)

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        """Everything about ``value`` that the spec does not allow; nothing if it `is_in`. Extra leading dims are
        allowed."""
        raise TypeError(f"{type(self).__name__} must define mismatches.")

    def is_in(self, value: Any) -> bool:
        """Whether ``value`` has the dtype, trailing shape and domain of the spec (on any device)."""
        return next(self.mismatches(value), None) is None

    def __contains__(self, value: Any) -> bool:
        return self.is_in(value)

    def assert_is_in(self, value: Any) -> None:
        """Raises AssertionError that lists every mismatch."""
        found = [f"{mismatch.name}: {mismatch.text}" for mismatch in self.mismatches(value)]
        if found:
            raise AssertionError(f"{type(self).__name__}: the value must be in the spec: {'; '.join(found)}")

    def type_check(self, value: Any) -> None:
        """Raises TypeError where the kind of value or its dtype is another than the spec's."""
        found = [f"{m.name}: {m.text}" for m in self.mismatches(value) if m.kind in ("type", "dtype")]
        if found:
            raise TypeError(f"{type(self).__name__}: {'; '.join(found)}")

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        """This spec with ``op`` applied to its first ``ndim`` dims."""
        raise TypeError(f"{type(self).__name__} must define _shaped.")

    def expand(self, *shape: int | Sequence[int]) -> Self:
        return self._shaped(algebra.expand(as_size(shape)), len(self.shape))

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        return self._shaped(algebra.reshape(as_size(shape)), len(self.shape))

    def view(self, *shape: int | Sequence[int]) -> Self:
        """`reshape`: a spec holds no data that could be shared."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        return self._shaped(algebra.flatten(self.shape, start_dim, end_dim), len(self.shape))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        return self._shaped(algebra.unflatten(self.shape, dim, Size(sizes)), len(self.shape))

    def squeeze(self, dim: int | None = None) -> Self:
        return self._shaped(algebra.squeeze(self.shape, dim), len(self.shape))

    def unsqueeze(self, dim: int) -> Self:
        return self._shaped(algebra.unsqueeze(self.shape, dim), len(self.shape))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        at = algebra.normal_dim(dim, self.shape, type(self).__name__)
        if self.shape[at] == -1:
            raise ShapeError(f"{type(self).__name__}: cannot unbind dim {dim} of {tuple(self.shape)}: it has any size.")
        ops = (algebra.select(self.shape, at, position) for position in range(self.shape[at]))
        return tuple(self._shaped(op, len(self.shape)) for op in ops)

    def __getitem__(self, item: Any) -> Any:
        return self._shaped(algebra.index(self.shape, item), len(self.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def ndimension(self) -> int:
        return len(self.shape)

    # -- copies --------------------------------------------------------------------------------------------------------

    def to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        """The same spec on another device, or of another dtype."""
        raise TypeError(f"{type(self).__name__} must define to.")

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        return self.to("cuda" if device is None else f"cuda:{device}")

    def clone(self) -> Self:
        return copy.copy(self)


class LeafSpec(TensorSpec):
    """The spec of one tensor.

    ``_fields`` names the attributes that hold the tensors of the domain (bounds, a mask), with the number of dims they
    have beyond the spec's shape. They are None, or unexpanded: size 1 where they do not vary.
    """

    _fields: ClassVar[dict[str, int]] = {}

    def __init__(self, shape: Sequence[int] | int, device: torch.device | str | int | None, dtype: torch.dtype | None):
        self.shape = Size([shape] if isinstance(shape, int) else shape)
        if any(size < -1 for size in self.shape):
            raise ConfigError(f"{type(self).__name__}: a dim is a size, or -1 for any: got shape {tuple(self.shape)}.")
        self._device = torch.get_default_device() if device is None else as_device(device)
        self.dtype = dtype

    # -- what a domain defines -----------------------------------------------------------------------------------------

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _sample.")

    def _outside(self, value: Tensor) -> Tensor | None:
        """bool, True where an entry of ``value`` is outside the domain; None: nowhere."""
        return None

    def _nearest(self, value: Tensor) -> Tensor:
        return value

    def _domain_text(self) -> str:
        return ""

    def cardinality(self) -> int | float:
        """How many values are in the domain; ``math.inf`` for a continuous or unbounded one."""
        return math.inf

    def _enumerate(self, use_mask: bool) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _enumerate.")

    # -- values --------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        return self._sample(self._full_shape(shape), generator).to(self.device, self.dtype)

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.zeros(self._full_shape(shape), dtype=self.dtype, device=self.device)

    def one(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.ones(self._full_shape(shape), dtype=self.dtype, device=self.device)

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        if not isinstance(value, Tensor):
            yield Mismatch(key, "type", f"declared a tensor, got {type(value).__name__}")
            return
        if value.dtype != self.dtype:
            yield Mismatch(key, "dtype", f"declared {self.dtype}, got {value.dtype}")
        if not fits(value.shape, self.shape):
            yield Mismatch(key, "shape", f"declared shape {tuple(self.shape)}, got {tuple(value.shape)}")
            return
        outside = self._outside(value)
        if outside is not None and bool(outside.any()):
            where = outside.nonzero()[0].tolist()
            bad = value[tuple(where)].item()
            yield Mismatch(key, "domain", f"declared {self._domain_text()}, got {bad} at {where}")

    def project(self, value: Tensor) -> Tensor:
        """The nearest value of the domain, entry by entry; ``value`` itself if it is in it.

        Raises  ShapeError for another shape, TypeError for another kind of value
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(self).__name__}.project: takes a tensor: got {type(value).__name__}.")
        if not fits(value.shape, self.shape):
            raise ShapeError(
                f"{type(self).__name__}.project: the trailing shape must be the spec's: got {tuple(value.shape)}, "
                f"expected {tuple(self.shape)}."
            )
        outside = self._outside(value)
        return self._nearest(value) if outside is not None and bool(outside.any()) else value

    def encode(self, value: Any) -> Tensor:
        """A number, list, array or tensor as a tensor of the spec's dtype and device.

        Raises  ShapeError unless the trailing shape is the spec's, up to dims of size 1; DataError for a value outside
                the domain, and for a fraction where the dtype is an integer
        """
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        if (
            tensor.is_floating_point()
            and not self.dtype.is_floating_point
            and not bool((tensor == tensor.round()).all())
        ):
            raise DataError(f"{type(self).__name__}.encode: {self.dtype} holds whole numbers only: got {value!r}.")
        tensor = tensor.to(self.device, self.dtype)
        if not fits(tensor.shape, self.shape):
            if [size for size in tensor.shape if size != 1] != [size for size in self.shape if size != 1]:
                raise ShapeError(
                    f"{type(self).__name__}.encode: the trailing shape must be the spec's: got {tuple(tensor.shape)}, "
                    f"expected {tuple(self.shape)}."
                )
            tensor = tensor.reshape(self.shape)
        outside = self._outside(tensor)
        if outside is not None and bool(outside.any()):
            raise DataError(f"{type(self).__name__}.encode: the value must be {self._domain_text()}: got {value!r}.")
        return tensor

    def to_numpy(self, value: Tensor) -> np.ndarray:
        """``value`` as an array. Raises TypeError if it is not of the spec's dtype."""
        self.type_check(value)
        return value.detach().cpu().numpy()

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """Every value of a finite domain, stacked along a new first dim; without those that a mask forbids if
        ``use_mask``.

        Raises  ConfigError for an infinite domain, or one of more than 2**24 values
        """
        number = self._count(use_mask)
        if number > _ENUMERABLE or -1 in self.shape:
            raise ConfigError(
                f"{type(self).__name__}.enumerate: needs a domain of at most {_ENUMERABLE} values of fixed shape: got "
                f"{number} of shape {tuple(self.shape)}."
            )
        return self._enumerate(use_mask).to(self.dtype)

    def _count(self, use_mask: bool) -> int | float:
        return self.cardinality()

    def _full_shape(self, shape: Sequence[int]) -> Size:
        return Size((*shape, *(1 if size == -1 else size for size in self.shape)))

    # -- shapes and copies ---------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        owner = type(self).__name__
        lead, measured = op.on_shape(self.shape[:ndim], owner)
        new = copy.copy(self)
        new.shape = Size((*lead, *self.shape[ndim:]))
        for name in self._fields:
            if (field := getattr(self, name)) is not None:
                setattr(new, name, op.on_field(field, lead, measured, owner))
        return new

    def to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        new = copy.copy(self)
        if isinstance(dest, torch.dtype):
            new.dtype = dest
        else:
            new._device = as_device(dest)
            for name in self._fields:
                if (field := getattr(self, name)) is not None:
                    setattr(new, name, field.to(new._device))
        return new

    def _expanded(self, name: str) -> Tensor:
        """A field at full shape, as a view: size 1 where the spec has any size."""
        field: Tensor = getattr(self, name)
        extra = field.shape[field.ndim - self._fields[name] :] if self._fields[name] else ()
        return field.expand((*self._full_shape(()), *extra))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, LeafSpec)
        mine, theirs = self._identity(), other._identity()
        return mine == theirs and all(self._same_field(other, name) for name in self._fields)

    __hash__ = None  # type: ignore[assignment]

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self.device, self.dtype

    def _same_field(self, other: LeafSpec, name: str) -> bool:
        mine, theirs = getattr(self, name), getattr(other, name)
        if mine is None or theirs is None:
            return mine is theirs
        return bool((mine == theirs).all())  # the specs have one shape, so size 1 broadcasts

    def __repr__(self) -> str:
        domain = self._domain_text()
        return (
            f"{type(self).__name__}({domain + ', ' if domain else ''}shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )


def as_device(device: torch.device | str | int) -> torch.device:
    """A device with its index, so that "cuda" and "cuda:0" compare equal where they are."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def fits(value: Size, declared: Size) -> bool:
    """Whether the last dims of ``value`` are ``declared``, where -1 is any size."""
    if len(value) < len(declared):
        return False
    tail = value[len(value) - len(declared) :]
    return all(size in (-1, got) for size, got in zip(declared, tail, strict=True))
