"""Shape algebra for specs: each shape operation is written once and serves a spec, its bounds and its mask.

A `ShapeOp` is a tensor operation on leading dims; later dims (a nested leaf's own dims, the ``n`` of a mask) do not
change. A spec applies the operation to a meta tensor to find its new shape, then to the tensors that describe its
domain. These are stored *unexpanded*: with size 1 in every dim along which they do not vary.

The last ``kept`` dims of a spec may belong to its domain, such as the entries of a one-hot vector. Dim arguments count
them, as they do for values, but must not address them.

A prime stands in for a dim of -1 ("any size"), so that a dim into which it is merged becomes -1 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from llmrl.errors import ShapeError, SpecIndexError

Shape = Sequence[int] | int | None

_STAND_INS = (7919, 7927, 7933, 7937)


@dataclass(frozen=True)
class ShapeOp:
    """``apply(tensor of shape lead + tail, tail)`` acts on ``lead``; ``text`` describes it in errors. In the
    result, dim ``any_dim`` gets size -1."""

    text: str
    apply: Callable[[Any, Size], Any]
    any_dim: int | None = None
    error: type[ShapeError] = ShapeError

    def on_shape(self, lead: Size, owner: str) -> tuple[Size, Size]:
        """Returns the new shape, and ``lead`` with the stand-in in place of -1.

        Raises  ShapeError, naming ``owner``, if the operation does not fit
        """
        # A prime that divides no size of the spec: a new size is a multiple of it only if a dim of -1 went into it.
        stand_in = next(prime for prime in _STAND_INS if all(size <= 0 or size % prime for size in lead))
        measured = Size(stand_in if size == -1 else size for size in lead)
        try:
            sizes = list(self.apply(torch.empty(measured, device="meta"), Size()).shape)  # meta: no memory
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise self.error(f"{owner}: cannot {self.text} a spec of shape {tuple(lead)}: {error}") from error
        if stand_in in measured:
            sizes = [-1 if size and size % stand_in == 0 else size for size in sizes]
        if self.any_dim is not None:
            sizes[self.any_dim] = -1
        return Size(sizes), measured

    def on_field(self, field: Tensor, lead: Size, measured: Size, owner: str) -> Tensor:
        """Applies the operation to an unexpanded tensor whose first ``len(measured)`` dims are those of the spec.

        ``lead`` is the new shape of those dims. The result is unexpanded again.
        """
        tail = field.shape[len(measured) :]
        return unexpanded(self.apply(field.expand((*measured, *tail)), tail), lead, owner)


def unexpanded(field: Tensor, lead: Size, owner: str) -> Tensor:
    """``field`` with size 1 in each leading dim along which it is a broadcast, or that is -1 in ``lead``."""
    for dim, size in enumerate(lead):
        if field.shape[dim] <= 1:
            continue
        if field.stride(dim) != 0:  # not a broadcast: the entries have to be compared
            if size != -1:
                continue
            if not bool((field == field.narrow(dim, 0, 1)).all()):
                raise ShapeError(f"{owner}: bounds and masks cannot vary along dim {dim}, which has size -1 (any).")
        field = field.narrow(dim, 0, 1)
    return field


def as_size(shape: Shape) -> Size:
    """Size from ``3``, ``(2, 3)`` or ``torch.Size([2, 3])``; None means no dims."""
    return Size(() if shape is None else (shape,) if isinstance(shape, int) else shape)


def of_arguments(shape: Sequence[Any]) -> Size:
    """Size from ``(2, 3)`` or ``((2, 3),)``: shape operations accept both."""
    return as_size(shape[0] if len(shape) == 1 else shape)


def resize(shape: Size, kept: int, method: str, sizes: Size) -> ShapeOp:
    """``method`` is "expand" or "reshape"; ``sizes`` ends with the dims of the domain, unchanged or -1."""
    own, asked = shape[len(shape) - kept :], sizes[max(0, len(sizes) - kept) :]
    text = f"{method} to {tuple(sizes)}"
    if len(asked) < kept or any(size not in (-1, mine) for size, mine in zip(asked, own, strict=True)):
        raise ShapeError(
            f"spec: cannot {text} a spec of shape {tuple(shape)}: its last dim belongs to its domain and cannot change."
        )
    lead = sizes[: len(sizes) - kept]
    return ShapeOp(text, lambda t, tail: getattr(t, method)((*lead, *tail)))


def flatten(shape: Size, kept: int, start_dim: int, end_dim: int) -> ShapeOp:
    if not shape:
        return unsqueeze(shape, kept, 0)
    text = f"flatten dims {start_dim} to {end_dim} of"
    start, end = lead_dim(start_dim, shape, kept, text), lead_dim(end_dim, shape, kept, text)
    return ShapeOp(text, lambda t, tail: t.flatten(start, end))


def unflatten(shape: Size, kept: int, dim: int, sizes: Size) -> ShapeOp:
    text = f"unflatten dim {dim} into {tuple(sizes)} of"
    at = lead_dim(dim, shape, kept, text)
    return ShapeOp(text, lambda t, tail: t.unflatten(at, sizes))


def squeeze(shape: Size, kept: int, dim: int | None) -> ShapeOp:
    dims = range(len(shape) - kept) if dim is None else [lead_dim(dim, shape, kept, f"squeeze dim {dim} of")]
    dropped = {d for d in dims if shape[d] == 1}
    index = tuple(0 if d in dropped else slice(None) for d in range(len(shape) - kept))
    return ShapeOp("squeeze", lambda t, tail: t[index])


def unsqueeze(shape: Size, kept: int, dim: int) -> ShapeOp:
    text = f"unsqueeze dim {dim} of"
    at = lead_dim(dim, Size((*shape, 1)), kept, text)
    return ShapeOp(text, lambda t, tail: t.unsqueeze(at))


def repeat(shape: Size, kept: int, dim: int, size: int) -> ShapeOp:
    """Inserts a dim of ``size`` at ``dim``, as `torch.stack` does for equal tensors."""
    at = lead_dim(dim, Size((*shape, 1)), kept, text := f"stack along dim {dim}")
    return ShapeOp(text, lambda t, tail: t.unsqueeze(at).expand((*t.shape[:at], size, *t.shape[at:])))


def select(dim: int, position: int) -> ShapeOp:
    before = (slice(None),) * dim
    return ShapeOp(f"take entry {position} of dim {dim} of", lambda t, tail: t[(*before, position)])


def empty(dim: int) -> ShapeOp:
    """Sets size 0 in every dim from ``dim`` on."""
    before = (slice(None),) * dim
    return ShapeOp(f"empty dims >= {dim} of", lambda t, tail: t[(*before, *(slice(0),) * (t.ndim - dim - len(tail)))])


def any_size(shape: Size, kept: int, dim: int) -> ShapeOp:
    """Sets the size of ``dim`` to -1."""
    text = f"set dim {dim} to -1 in"
    return ShapeOp(text, lambda t, tail: t, lead_dim(dim, shape, kept, text))


def index(shape: Size, kept: int, item: Any) -> ShapeOp:
    """``spec[item]`` for any index that tensors accept; an Ellipsis covers dims of ``shape`` only."""
    full = full_index(shape, item)
    if any(not isinstance(part, slice) or part != slice(None) for part in full[len(full) - kept :]):
        raise SpecIndexError(
            f"spec: cannot index with {item!r} a spec of shape {tuple(shape)}: its last dim belongs to its domain and "
            "cannot be indexed."
        )
    lead = full[: len(full) - kept]
    return ShapeOp(f"index with {item!r}", lambda t, tail: t[lead], error=SpecIndexError)


def lead_dim(dim: int, shape: Size, kept: int, text: str) -> int:
    """``dim`` counted from 0. Raises ShapeError for a dim that is absent or belongs to the domain."""
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        raise SpecIndexError(f"spec: cannot {text} a spec with {ndim} possible dims.")
    if dim % ndim >= ndim - kept:
        raise ShapeError(f"spec: cannot {text} a spec whose last dim belongs to its domain: that dim cannot change.")
    return dim % ndim


def full_index(shape: Size, item: Any) -> tuple[Any, ...]:
    """``item`` with one part per dim of ``shape``: Ellipsis expanded, masks replaced by the positions they select."""
    items = [_as_index(part) for part in (item if isinstance(item, tuple) else (item,))]
    wanted = sum(_dims_used(part) for part in items)
    if wanted > len(shape):
        raise SpecIndexError(f"spec: an index cannot have more dims than the spec: got {wanted}, shape {tuple(shape)}.")
    missing = [slice(None)] * (len(shape) - wanted)
    holes = [position for position, part in enumerate(items) if part is Ellipsis]
    if len(holes) > 1:
        raise SpecIndexError("spec: an index can hold at most one Ellipsis.")
    at = holes[0] if holes else len(items)
    items[at : at + len(holes)] = missing  # in place of the Ellipsis, or at the end without one
    full: list[Any] = []
    dim = 0
    for part in items:
        used = _dims_used(part)
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            if part.shape != shape[dim : dim + used]:
                raise SpecIndexError(
                    f"spec: a mask index must have the shape of the dims it masks: got {tuple(part.shape)}, expected "
                    f"{tuple(shape[dim : dim + used])}."
                )
            full.extend(part.nonzero(as_tuple=True))  # a meta tensor cannot be masked
        elif isinstance(part, Tensor) and bool(((part >= (size := shape[dim])) | (part < -size)).any()) and size >= 0:
            raise SpecIndexError(f"spec: an index must be below the size of its dim: got {part.tolist()}, size {size}.")
        elif isinstance(part, slice) and shape[dim] == -1:
            full.append(slice(None))  # a slice of a dim of any size also has any size
        else:
            full.append(part)
        dim += used
    return tuple(full)


def _as_index(part: Any) -> Any:
    if isinstance(part, (bool, str)):
        raise SpecIndexError(f"spec: an index cannot hold {part!r}.")
    if not isinstance(part, (list, range, np.ndarray)):
        return part
    try:
        return torch.as_tensor(part, dtype=None if len(part) else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecIndexError(f"spec: an index cannot hold {part!r}: {error}.") from error


def _dims_used(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
