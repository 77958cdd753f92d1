"""`TensorSpec`: the interface of every spec: of one entry (`LeafSpec`), of several (`Composite`) or of a stack.

Shape operations are implemented here once, on top of `_shaped` and the algebra in `shape`. The torch functions of the
same names also accept specs; `torch.stack` is in `stacked`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from tensordict import NestedKey
from torch import Size, Tensor

from llmrl.data.specs import shape as algebra
from llmrl.data.specs.shape import Shape, ShapeOp, as_size, of_arguments
from llmrl.errors import ConfigError, ShapeError

_ENUMERABLE = 1 << 24

Device = torch.device | str | int | None

_METHODS = {
    getattr(torch, name): name
    for name in ("flatten", "index_select", "reshape", "squeeze", "unbind", "unflatten", "unsqueeze")
}


class Mismatch(NamedTuple):
    """One difference between a value and what its spec declares. ``key`` is () for a leaf checked on its own."""

    key: tuple[str, ...]
    kind: Literal["missing", "type", "dtype", "shape", "domain"]
    text: str

    @property
    def name(self) -> str:
        return repr(self.key[0] if len(self.key) == 1 else self.key) if self.key else "value"


class TensorSpec(abc.ABC):
    """Shape, device, dtype and domain of an entry, or of several (`Composite`). Operations return new specs; only
    methods ending in an underscore and writes to `Composite` entries, masks and a provisional ``n`` work in place.

    A dim of -1 matches any size; `rand`, `zero` and `one` use size 1 for it. Shape operations work as on tensors, apply
    to bounds and masks too, and raise ShapeError where they would fail on a tensor of this shape.
    """

    shape: Size
    dtype: torch.dtype | None
    _kept: ClassVar[int] = 0
    """The number of trailing dims that belong to the domain; shape operations must not touch them."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device | None: ...

    @property
    def domain(self) -> Literal["continuous", "discrete"] | None:
        """``"discrete"`` if the values are whole numbers, else ``"continuous"``; None if the spec leaves that open."""
        return None

    @property
    def space(self) -> Self:
        """The object with ``low`` and ``high``, or ``n``: the spec itself."""
        return self

    # -- values --------------------------------------------------------------------------------------------------------

    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """A random value from the domain, of shape ``shape + self.shape``; it always satisfies `is_in`."""
        return self._rand(as_size(shape), generator)

    def zero(self, shape: Shape = ()) -> Any:
        """Zeros of the right shape, dtype and device; where 0 is outside the domain, the nearest value in it."""
        return self._filled(0, as_size(shape))

    def one(self, shape: Shape = ()) -> Any:
        """Ones of the right shape, dtype and device; where 1 is outside the domain, the nearest value in it."""
        return self._filled(1, as_size(shape))

    sample, zeros, ones = rand, zero, one

    @abc.abstractmethod
    def _rand(self, shape: Size, generator: torch.Generator | None) -> Any: ...

    @abc.abstractmethod
    def _filled(self, number: int, shape: Size) -> Any:
        """A value of shape ``shape + self.shape`` that holds the domain values nearest to ``number``."""

    @abc.abstractmethod
    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        """Yields each way in which ``value`` violates the spec. Extra leading dims are allowed."""

    def is_in(self, value: Any) -> bool:
        """True if ``value`` has the dtype, trailing shape and domain of the spec (on any device)."""
        return next(self.mismatches(value), None) is None

    contains = __contains__ = is_in

    def assert_is_in(self, value: Any) -> None:
        """Raises an AssertionError that lists every mismatch."""
        found = [f"{mismatch.name}: {mismatch.text}" for mismatch in self.mismatches(value)]
        if found:
            raise AssertionError(f"{type(self).__name__}: the value must be in the spec: {'; '.join(found)}")

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Raises TypeError if ``value`` has the wrong type or dtype; the message refers to it as ``key``."""
        path = () if key is None else (key,) if isinstance(key, str) else key
        found = [f"{m.name}: {m.text}" for m in self.mismatches(value, path) if m.kind in ("type", "dtype")]
        if found:
            raise TypeError(f"{type(self).__name__}: {'; '.join(found)}")

    @abc.abstractmethod
    def project(self, value: Any) -> Any:
        """The nearest value in the domain; ``value`` is not changed."""

    @abc.abstractmethod
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Converts numbers, lists and arrays to a value of the spec; the inverse of `to_numpy`. With ``ignore_device``
        the result stays on the device of ``value``."""

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Converts ``value`` to arrays, numbers and strings; ``safe`` raises AssertionError unless it `is_in`."""
        if safe:
            self.assert_is_in(value)
        return self._to_numpy(value)

    @abc.abstractmethod
    def _to_numpy(self, value: Any) -> Any: ...

    def memoize_encode(self, mode: bool = True) -> None:
        """Makes `encode` cache its results for numbers and arrays; False turns the cache off."""
        for spec in self._children():
            spec.memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        """Empties the cache of `encode`."""
        for spec in self._children():
            spec.erase_memoize_cache()

    def cardinality(self) -> int | float:
        """The number of values in the domain; ``math.inf`` for a continuous or unbounded one."""
        return self._count(use_mask=True)

    def enumerate(self, use_mask: bool = False) -> Any:
        """All values of a finite domain along a new first dim; ``use_mask`` omits those a mask forbids.

        Raises  ConfigError for an infinite domain, or one of more than 2**24 values
        """
        number = self._count(use_mask)  # checked before listing: the list might not fit in memory
        if number > _ENUMERABLE or -1 in self.shape:
            raise ConfigError(
                f"{type(self).__name__}.enumerate: needs at most {_ENUMERABLE} values and a fixed shape: got more "
                f"values, or a dim of -1 in shape {tuple(self.shape)}."
            )
        return self._enumerate(use_mask)

    def _count(self, use_mask: bool) -> int | float:
        return math.prod(spec._count(use_mask) for spec in self._children())

    @abc.abstractmethod
    def _enumerate(self, use_mask: bool) -> Any:
        """`enumerate` for a domain that is known to be finite."""

    def _full_shape(self, shape: Sequence[int]) -> Size:
        return Size((*shape, *(1 if size == -1 else size for size in self.shape)))

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        """This spec with ``op`` applied to its first ``ndim`` dims."""
        return self._map(lambda spec: spec._shaped(op, ndim))

    def _emptied(self, ndim: int) -> Self:
        """This spec with size 0 in all dims but the first ``ndim``."""
        return self._map(lambda spec: spec._emptied(ndim))

    def _reshaped(self, make: Callable[..., ShapeOp], *args: Any) -> Self:
        return self._shaped(make(self.shape, self._kept, *args), len(self.shape) - self._kept)

    def expand(self, *shape: int | Sequence[int]) -> Self:
        return self._reshaped(algebra.resize, "expand", of_arguments(shape))

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        return self._reshaped(algebra.resize, "reshape", of_arguments(shape))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        return self._reshaped(algebra.flatten, start_dim, end_dim)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        return self._reshaped(algebra.unflatten, dim, Size(sizes))

    def squeeze(self, dim: int | None = None) -> Self:
        return self._reshaped(algebra.squeeze, dim)

    def unsqueeze(self, dim: int) -> Self:
        return self._reshaped(algebra.unsqueeze, dim)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        at = algebra.lead_dim(dim, self.shape, self._kept, f"unbind dim {dim} of")
        if self.shape[at] == -1:
            raise ShapeError(f"{type(self).__name__}: cannot unbind dim {dim} of {tuple(self.shape)}: it has any size.")
        ndim = len(self.shape) - self._kept
        return tuple(self._shaped(algebra.select(at, position), ndim) for position in range(self.shape[at]))

    def index_select(self, dim: int, index: Tensor) -> Self:
        at = algebra.lead_dim(dim, self.shape, self._kept, f"index dim {dim} of")
        return self[(*[slice(None)] * at, index)]

    def make_neg_dim(self, dim: int) -> Self:
        """The spec with size -1 (any) in ``dim``. Raises ShapeError if bounds or a mask vary along it."""
        return self._reshaped(algebra.any_size, dim)

    def __getitem__(self, item: Any) -> Any:
        return self._reshaped(algebra.index, item)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            return getattr(args[0], _METHODS[func])(*args[1:], **(kwargs or {}))
        if func is torch.stack:
            from llmrl.data import specs  # `stacked` imports this file

            return specs.stacked.stack(*args, **(kwargs or {}))
        return NotImplemented

    # -- copies --------------------------------------------------------------------------------------------------------

    def to(self, dest: torch.device | str | int | torch.dtype | None) -> Self:
        """The same spec on another device or with another dtype; None returns the spec itself."""
        return self if dest is None else self._to(dest)

    def _to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        return self._map(lambda spec: spec.to(dest))

    def clone(self) -> Self:
        return self._map(lambda spec: spec.clone())

    @abc.abstractmethod
    def _map(self, change: Callable[[TensorSpec], TensorSpec]) -> Self:
        """A copy with ``change`` applied to each child spec."""

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        return self.to("cuda" if device is None else f"cuda:{device}")

    def clear_device_(self) -> Self:
        """Removes the device of a `Composite` and of those nested in it; leaves keep theirs. Returns self."""
        for spec in self._children():
            spec.clear_device_()
        return self

    def _children(self) -> Sequence[TensorSpec]:
        """The child specs, one level down."""
        return ()

    @abc.abstractmethod
    def _identity(self) -> tuple[Any, ...]:
        """The values that `__eq__` compares between specs of the same class."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return type(self) is type(other) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]  # equality depends on content, which can change


def as_device(device: torch.device | str | int) -> torch.device:
    """The device with its CUDA index, so that "cuda" equals "cuda:0" if that is the current device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def listing(spec: TensorSpec, rows: Iterable[str], end: str) -> str:
    """The repr of a spec with child specs, one per row."""
    indented = "".join(f"    {row},\n".replace("\n    ", "\n        ") for row in rows)
    return f"{type(spec).__name__}(\n{indented}    {end})"


def fits(value: Size, declared: Size) -> bool:
    """True if the trailing dims of ``value`` match ``declared``, where -1 matches any size."""
    if len(value) < len(declared):
        return False
    tail = value[len(value) - len(declared) :]
    return all(size in (-1, got) for size, got in zip(declared, tail, strict=True))


def combinations(ranges: Sequence[Tensor], shape: Size) -> Tensor:
    """Every combination of one entry per range, as a tensor [number, *shape]; the last range varies fastest."""
    number = math.prod(len(values) for values in ranges)
    # The mixed-radix digits of a combination's position are its positions in the ranges. Broadcasting would need one
    # dim per range, and tensors have at most 64.
    rest, columns = torch.arange(number), []
    for values in reversed(ranges):
        columns.append(values.cpu()[rest % len(values)])
        rest = rest // len(values)
    return torch.stack(columns[::-1], -1).reshape(number, *shape) if columns else torch.zeros(number, *shape).long()
