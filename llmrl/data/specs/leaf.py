"""`LeafSpec`: the base class of all specs of a single tensor.

A subclass defines its domain in four methods (`_sample`, `_outside`, `_nearest`, `_entry_values`) and lists the tensors
that describe it in `_fields`; everything else is here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.data.specs.base import Device, Mismatch, Shape, TensorSpec, as_device, combinations, fits
from llmrl.data.specs.shape import ShapeOp, as_size, empty, unexpanded
from llmrl.errors import ConfigError, DataError, ShapeError

_MEMO_SIZE = 4096


class LeafSpec(TensorSpec):
    """The spec of one tensor.

    ``_fields`` maps each attribute that holds a tensor of the domain (bounds, a mask) to the number of its dims after
    the spec's dims (the last ``_kept`` not counted). A field is None, or unexpanded: size 1 where it does not vary.
    """

    _fields: ClassVar[dict[str, int]] = {}
    _memo: dict[Any, Tensor] | None = None

    def __init__(self, shape: Shape, device: Device, dtype: torch.dtype | None):
        self.shape = as_size(shape)
        if any(size < -1 for size in self.shape):
            raise ConfigError(f"{type(self).__name__}: dims must be sizes or -1 (any): got shape {tuple(self.shape)}.")
        self._device = torch.get_default_device() if device is None else as_device(device)
        self.dtype = dtype

    # -- what a domain defines -----------------------------------------------------------------------------------------

    _sample: Callable[[Size, torch.Generator | None, torch.device], Tensor]
    """Draws values of any dtype. Not abstract: a `Bounded` changes to its subclass in ``__init__``."""

    def _outside(self, value: Tensor) -> Tensor | None:
        """bool tensor, True where ``value`` is outside the domain; None if no value can be outside."""
        return None

    def _nearest(self, value: Tensor) -> Tensor:
        """The nearest value in the domain, in the spec's dtype; ``value`` may have any dtype."""
        return cast(value, self.dtype)

    def _domain_text(self) -> str:
        return ""

    def _entry_values(self, use_mask: bool, field: Callable[[str], Tensor]) -> Sequence[range | Tensor] | None:
        """The possible values of each entry of ``field(name)``, or one set for all entries; None if infinite."""
        return None

    # -- values --------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def domain(self) -> Literal["continuous", "discrete"]:
        return "discrete"

    def _rand(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        size = self._full_shape(shape)
        if 0 in size:  # a one-hot vector of size 0 cannot hold a choice
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        device = self.device if generator is None else generator.device  # a generator only works on its own device
        return self._sample(size, generator, device).to(self.device, self.dtype)

    def _filled(self, number: int, shape: Size) -> Tensor:
        return self.project(torch.full(self._full_shape(shape), number, dtype=self.dtype, device=self.device))

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        if not isinstance(value, Tensor):
            yield Mismatch(key, "type", f"declared a tensor, got {type(value).__name__}")
            return
        if value.dtype != self.dtype:
            yield Mismatch(key, "dtype", f"declared {self.dtype}, got {value.dtype}")
        if not fits(value.shape, self.shape):
            yield Mismatch(key, "shape", f"declared shape {tuple(self.shape)}, got {tuple(value.shape)}")
        elif (where := self._first_outside(value)) is not None:
            bad = value[where].tolist()
            yield Mismatch(key, "domain", f"declared {self._domain_text()}, got {bad} at {list(where)}")

    def project(self, value: Tensor) -> Tensor:
        """The nearest value in the domain, entry by entry; ``value`` itself if it `is_in`.

        Raises  ShapeError for a wrong trailing shape; TypeError unless ``value`` is a tensor
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(self).__name__}.project: value must be a tensor: got {type(value).__name__}.")
        if not fits(value.shape, self.shape):
            raise ShapeError(
                f"{type(self).__name__}.project: the trailing shape must be the spec's: got {tuple(value.shape)}, "
                f"expected {tuple(self.shape)}."
            )
        if value.dtype == self.dtype and self._first_outside(value) is None:
            return value
        return self._nearest(value) if value.numel() else value.to(self.dtype)

    def encode(self, value: Any, *, ignore_device: bool = False) -> Tensor:
        """Converts a number, list, array or tensor to a tensor of the spec's dtype and device.

        Raises  ShapeError unless the trailing shape is the spec's, up to dims of size 1; DataError for a value outside
                the domain, and for a fraction if the dtype is an integer
        """
        if ignore_device:
            return self.to(value.device if isinstance(value, Tensor) else "cpu").encode(value)
        key = None if self._memo is None else _memo_key(value)
        if key is None:
            return self._encode(value)
        if key not in self._memo:
            if len(self._memo) >= _MEMO_SIZE:  # bounds the memory if values do not repeat
                self._memo.clear()
            self._memo[key] = self._encode(value)
        return self._memo[key].clone()  # the caller may modify the result

    def memoize_encode(self, mode: bool = True) -> None:
        self._memo = {} if mode else None

    def erase_memoize_cache(self) -> None:
        self.memoize_encode(self._memo is not None)

    def _count(self, use_mask: bool) -> int | float:
        values = None if -1 in self.shape else self._entry_values(use_mask, partial(getattr, self))
        if values is None:
            return math.inf
        counts = [each.stop - each.start if isinstance(each, range) else len(each) for each in values]
        return math.prod(counts) ** (self.shape.numel() // max(len(counts), 1))  # unexpanded: each stands for several

    def _enumerate(self, use_mask: bool) -> Tensor:
        values = [torch.as_tensor(each) for each in self._entry_values(use_mask, self._expanded)]
        values *= self.shape.numel() // max(len(values), 1)
        return combinations(values, self.shape).to(self.device, self.dtype)

    def _to_numpy(self, value: Tensor) -> np.ndarray:
        return value.detach().cpu().numpy()

    def _encode(self, value: Any) -> Tensor:
        given = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
        tensor = given.to(self.device, self.dtype, copy=True)  # the caller may modify ``value`` later
        # Rounding to a float is expected. A cast to an integer must be exact, so the result is cast back and compared.
        exact = self.dtype.is_floating_point or self.dtype.is_complex or tensor.is_meta
        if not exact and not bool((tensor.to(given.dtype) == given.to(self.device)).all()):
            raise DataError(
                f"{type(self).__name__}.encode: {self.dtype} only holds whole numbers within its range: got {value!r}."
            )
        if not fits(tensor.shape, self.shape):
            # Reading (4,) as (4, 1) is safe; reading (4, 3) as (3, 4) would mix up the entries.
            if [size for size in tensor.shape if size != 1] != [size for size in self.shape if size != 1]:
                raise ShapeError(
                    f"{type(self).__name__}.encode: the trailing shape must be the spec's: got {tuple(tensor.shape)}, "
                    f"expected {tuple(self.shape)}."
                )
            tensor = tensor.reshape(self.shape)
        if self._first_outside(tensor) is not None:
            raise DataError(f"{type(self).__name__}.encode: the value must be {self._domain_text()}: got {value!r}.")
        return tensor

    def _first_outside(self, value: Tensor) -> tuple[int, ...] | None:
        if value.is_meta or not value.numel() or (value.is_complex() and not self.dtype.is_complex):
            return None
        outside = self._outside(value)
        return tuple(outside.nonzero()[0].tolist()) if outside is not None and bool(outside.any()) else None

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

    def _map(self, change: Callable[[TensorSpec], TensorSpec]) -> Self:
        return copy.copy(self)

    def _emptied(self, ndim: int) -> Self:
        return self._shaped(empty(ndim), len(self.shape) - self._kept)

    def _to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        new = copy.copy(self)
        if isinstance(dest, torch.dtype):
            new.dtype = dest
        else:
            new._device = as_device(dest)
            for name in self._fields:
                if (field := getattr(self, name)) is not None:
                    setattr(new, name, field.to(new._device))
        return new

    def _field(self, value: Tensor, name: str, label: str) -> Tensor:
        """``value`` as a field: on the spec's device, with all dims, of size 1 where it does not vary.

        Raises  ShapeError unless it broadcasts to the spec's shape
        """
        lead = self.shape[: len(self.shape) - self._kept]
        extra = self._fields[name]
        tail = value.shape[value.ndim - extra :]
        missing = len(lead) + extra - value.ndim  # leading dims, added with size 1 as in broadcasting
        sizes = (*(1,) * missing, *value.shape[: value.ndim - extra])
        if missing < 0 or any(got not in (1, size) for got, size in zip(sizes, lead, strict=True)):
            raise ShapeError(
                f"{type(self).__name__}: {label} must broadcast to the shape {(*lead, *tail)}: got "
                f"{tuple(value.shape)}."
            )
        return unexpanded(value.to(self.device).reshape((*sizes, *tail)), lead, type(self).__name__).clone()

    def _expanded(self, name: str) -> Tensor:
        """A field expanded to the spec's shape, as a view; size 1 where the spec has -1."""
        field: Tensor = getattr(self, name)
        extra = self._fields[name]
        lead = self._full_shape(())[: len(self.shape) - self._kept]
        return field.expand((*lead, *field.shape[field.ndim - extra :]))

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start with an empty cache: encoded values depend on shape, dtype and device.
        state = dict(vars(self))
        if state.get("_memo") is not None:
            state["_memo"] = {}
        return state

    def __eq__(self, other: object) -> bool:
        same = super().__eq__(other)
        if same is not True:
            return same
        pairs = [(getattr(self, name), getattr(other, name)) for name in self._fields]
        # The shapes are equal here, so unexpanded fields broadcast to each other.
        return all(a is b if a is None or b is None else bool((a == b).all()) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self.device, self.dtype

    def __repr__(self) -> str:
        domain = self._domain_text()
        return (
            f"{type(self).__name__}({domain + ', ' if domain else ''}shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in another dtype; for an integer dtype, rounded and clamped to its range."""
    if value.dtype == dtype:
        return value
    if value.is_complex() and not dtype.is_complex:
        value = value.real
    if dtype.is_floating_point or dtype.is_complex or value.dtype == torch.bool:
        return value.to(dtype)
    if value.is_floating_point():
        value = value.double().nan_to_num(0.0).round()
    if dtype == torch.bool:
        return value > 0
    limits = torch.iinfo(dtype)
    if not value.is_floating_point():
        own = torch.iinfo(value.dtype)
        if limits.min <= own.min and own.max <= limits.max:
            return value.to(dtype)
    over = value >= limits.max  # as a double the largest int64 rounds up by one and would overflow in the cast
    return value.clamp(min=limits.min).masked_fill(over, 0).to(dtype).masked_fill(over, limits.max)


def field_text(field: Tensor) -> str:
    """Short text of a field of any size, for error messages and reprs."""
    if field.is_meta or not field.numel():
        return "?"
    if field.numel() > 16:
        return f"[{field.min().item()} ... {field.max().item()}]"
    return str(field.item() if field.numel() == 1 else field.squeeze().tolist())


def _memo_key(value: Any) -> Any:
    # None if a cache entry would cost more than encoding again, or if the value is mutable.
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return (type(value), value) if isinstance(value, (bool, int, float, str, np.generic)) else None
