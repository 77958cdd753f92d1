"""Cheap operations on batches with ragged entries: shallow copies, filling gaps, replacing rows, stacking.

They handle containers only and never read lazily stacked rows: tensorclasses and lazy stacks are moved unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from llmrl.data.ragged.tensordicts import dim_names, entries_of, inner, new_tensordict, present_keys, rewrap
from llmrl.errors import MissingKeyError, ShapeError


def shallow_copy(td: TensorDictBase, without: Collection[str] = ()) -> TensorDictBase:
    """Returns a new root with the same entries (nested containers are shared), minus the root keys in ``without``."""
    if type(td) is not TensorDict:
        return td.exclude(*without)
    entries = {key: value for key, value in td.items() if key not in without}
    return new_tensordict(entries, td.batch_size, td.device, dim_names(td))


def any_row(flags: Tensor) -> bool:
    """Returns ``flags.any()``; five times faster if there is only one flag."""
    return bool(flags) if flags.numel() == 1 else bool(flags.any())


def fill_missing(td: TensorDictBase, other: TensorDictBase) -> None:
    """Adds to ``td``, in place, the entries of ``other`` that it lacks; recurses into plain nested tensordicts."""
    if isinstance(td, LazyStackedTensorDict):
        for row, more in zip(td.tensordicts, other.unbind(td.stack_dim), strict=True):
            fill_missing(row, more)
        return
    keys = td.keys()
    for key, value in other.items():
        if key not in keys:
            td.set(key, value)
        elif type(value) is TensorDict and type(nested := td.get(key)) is TensorDict:
            filled = shallow_copy(nested)
            fill_missing(filled, value)
            td.set(key, filled)


def put_rows(old: TensorDictBase, rows: Tensor, new: TensorDictBase, *, reader: str) -> TensorDictBase:
    """Returns a new tensordict: ``old`` with the rows where ``rows`` (bool[*B]) is True replaced by those of ``new``.

    Raises  MissingKeyError for an entry of ``new`` that ``old`` lacks; ShapeError if the rows do not fit
    """
    count = int(rows.sum())
    if new.batch_size.numel() != count:
        raise ShapeError(f"{reader}: {count} rows are to be replaced: got {new.batch_size.numel()} new ones.")
    out = shallow_copy(old)
    keys = old.keys()
    for key, value in new.items():
        if key not in keys:
            raise MissingKeyError(
                f"{reader}: rows that are not reset keep their values, so the tensordict must hold {key!r}: "
                f"keys present: {present_keys(old)}."
            )
        try:
            out.set(key, _replaced(old.get(key), rows, value, reader))
        except (RuntimeError, IndexError) as error:
            raise ShapeError(f"{reader}: the new rows of {key!r} must fit the old ones: {error}") from error
    return out


def update_rows(old: TensorDictBase, rows: Tensor, new: TensorDictBase, *, reader: str) -> TensorDictBase:
    """Overwrites rows of ``old`` with rows of ``new`` (same number of rows) where ``rows`` (bool[*B]) is True.

    Other rows only get the entries that they lack. If ``old`` or ``new`` is ragged, whole rows are overwritten.

    Returns a new tensordict
    Raises  ShapeError if the rows do not fit
    """
    if not isinstance(old, LazyStackedTensorDict) and not isinstance(new, LazyStackedTensorDict):
        return _update_entries(old, rows, new, reader)
    updated = []
    overwrites = rows.reshape(len(rows), -1).any(1).tolist()
    for overwrite, before, after in zip(overwrites, old.unbind(0), new.unbind(0), strict=True):
        row = shallow_copy(before)
        kept = () if overwrite else before.keys()
        for key in after.keys():
            if key not in kept:
                row.set(key, after.get(key))
        updated.append(row)
    return LazyStackedTensorDict.maybe_dense_stack(updated, 0)


def _update_entries(old: TensorDictBase, rows: Tensor, new: TensorDictBase, reader: str) -> TensorDictBase:
    entries = dict(old.items())
    others: dict[str, Any] = {}  # entries that must be indexed, which takes several times as long
    for key, value in new.items():
        before = entries.get(key)
        if before is None:
            entries[key] = value
        elif type(before) is type(value) is TensorDict:
            entries[key] = _update_entries(before, rows, value, reader)
        elif isinstance(before, Tensor) and isinstance(value, Tensor) and _alike(before, value):
            mask = rows.view(*rows.shape, *[1] * (value.ndim - rows.ndim))
            entries[key] = torch.where(mask, value, before)
        else:
            others[key] = value
    out = new_tensordict(entries, old.batch_size, old.device, dim_names(old))  # ``others`` still have old values
    return put_rows(out, rows, new.select(*others)[rows], reader=reader) if others else out


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout == torch.strided


def stack_steps(steps: Sequence[TensorDictBase], without: Collection[tuple[str, ...]] = ()) -> TensorDictBase:
    """Stacks the steps along a new last dim named "time": dense if all steps have the same shapes, else lazily.

    Entries whose key, as a tuple, is in ``without`` are left out.
    """
    dim = steps[0].batch_dims
    try:  # almost always dense: tried without first comparing all shapes
        return _dense_stack(steps, dim, without)
    except (KeyError, RuntimeError, ShapeError):
        pass
    # named at creation: naming the finished stack would visit every row of every entry
    steps = [step.exclude(*without) for step in steps] if without else list(steps)
    return LazyStackedTensorDict.lazy_stack(steps, dim, stack_dim_name="time")


_dtype, _is_nested = operator.attrgetter("dtype"), operator.attrgetter("is_nested")


def _dense_stack(
    steps: Sequence[TensorDictBase], dim: int, without: Collection[tuple[str, ...]], path: tuple[str, ...] = ()
) -> TensorDict:
    # entry by entry: TensorDict.stack takes ten times as long
    if any(type(step) is not TensorDict for step in steps):
        raise ShapeError("ragged")
    rows = [entries_of(step) for step in steps]
    entries: dict[str, Any] = {}
    for key, first in rows[0].items():
        if (*path, key) in without:
            continue
        values = [row[key] for row in rows]
        if isinstance(first, Tensor):
            if len(set(map(_dtype, values))) > 1 or any(map(_is_nested, values)):
                raise ShapeError("ragged")
            entries[key] = torch.stack(values, dim)
        elif type(first) is TensorDict:
            entries[key] = _dense_stack(values, dim, without, (*path, key))
        elif isinstance(first, (NonTensorData, NonTensorStack)):
            entries[key] = lazy_stack(values, dim)
        else:
            raise ShapeError("ragged")
    if any(len(row) != len(rows[0]) for row in rows):  # a later step has an entry that the first one lacks
        raise ShapeError("ragged")
    batch_size = [*steps[0].batch_size[:dim], len(steps), *steps[0].batch_size[dim:]]
    names = [*(dim_names(steps[0]) or [None] * steps[0].batch_dims)]
    return new_tensordict(entries, batch_size, steps[0].device, [*names[:dim], "time", *names[dim:]])


def _replaced(old: Any, rows: Tensor, new: Any, reader: str) -> Any:
    if isinstance(old, Tensor):
        out = old.clone()
        out[rows] = new
        return out
    if type(old) is TensorDict and type(new) is TensorDict:  # entry by entry: keeps entries that ``new`` lacks
        return put_rows(old, rows, new, reader=reader)
    if isinstance(old, (NonTensorData, NonTensorStack)):
        return NonTensorStack(*_merged(_members(old), rows, _members(new)))
    if is_tensorclass(old):
        return rewrap(old, _replaced(inner(old), rows, inner(new), reader))
    return LazyStackedTensorDict.lazy_stack(_merged(_members(old), rows, _members(new)), 0)


def _members(value: Any) -> list[Any]:
    if isinstance(value, LazyStackedTensorDict) and value.stack_dim == 0:
        return list(value.tensordicts)
    if not is_tensor_collection(value):
        raise ShapeError(f"a {type(value).__name__} cannot be split into rows.")
    return list(value.unbind(0))


def _merged(old: list[Any], rows: Tensor, new: list[Any]) -> list[Any]:
    fresh = iter(new)
    return [next(fresh) if flag else member for flag, member in zip(torch.atleast_1d(rows).tolist(), old, strict=True)]
