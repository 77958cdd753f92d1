"""Builds and reads tensordicts without tensordict's argument checks, which cost more than the rest of a rollout step.

Only this package depends on how tensordict stores its entries. Columns of Python objects (strings, lists of messages)
are a ``NonTensorStack`` of one ``NonTensorData`` per row: its public constructor and ``tolist`` take 3 to 7 us per row,
`column` and `column_values` less than 1 us.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)
from torch import Tensor

from llmrl.data.ragged.padding import pad_rows
from llmrl.errors import MissingKeyError, ShapeError

C = TypeVar("C")
_SCALAR = torch.Size([])


def new_tensordict(
    entries: dict[str, Any],
    batch_size: Sequence[int] = _SCALAR,
    device: torch.device | None = None,
    names: Sequence[str | None] | None = None,
) -> TensorDict:
    """A TensorDict over this dict of entries, not a copy; the entries must fit the batch size and the device."""
    return TensorDict._new_unsafe(entries, batch_size=torch.Size(batch_size), device=device, names=names)


def bare_tensordict(entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """`new_tensordict` without inspecting the entries, which costs as much as a small batch; not for compiled code."""
    td = TensorDict.__new__(TensorDict)
    td._tensordict, td._batch_size, td._device, td._td_dim_names = entries, batch_size, device, None
    return td


def entries_of(td: TensorDict) -> dict[str, Any]:
    """The dict in which a TensorDict stores its entries; do not change it."""
    return td._tensordict


def entry(td: TensorDictBase, name: str) -> Any:
    """``td.get(name, None)`` for an entry at the root; for a plain TensorDict, 50 times faster."""
    return td._tensordict.get(name) if type(td) is TensorDict else td.get(name, None)


def attach(td: TensorDictBase, name: str, nested: TensorDictBase) -> None:
    """``td.set(name, nested)``, without tensordict's checks if the two clearly fit."""
    if (
        type(td) is type(nested) is TensorDict
        and td._batch_size == nested._batch_size
        and td._device == nested._device
        and td._td_dim_names is nested._td_dim_names is None
        and not td._is_locked
    ):
        td._tensordict[name] = nested
    else:
        td.set(name, nested)


def dim_names(td: TensorDictBase) -> list[str | None] | None:
    """The names of the batch dimensions; None if none has a name."""
    return td.names if td._has_names() else None


def inner(collection: Any) -> Any:
    """The tensordict of a tensorclass; tensordicts and None are returned unchanged."""
    return collection if collection is None or isinstance(collection, TensorDictBase) else collection._tensordict


def fill(collection: Any, td: TensorDictBase) -> None:
    """Sets the tensordict of a tensorclass object, which may come straight from ``__new__``."""
    collection.__dict__["_tensordict"] = td
    collection.__dict__.setdefault("_non_tensordict", {})


def rewrap(like: C, td: TensorDictBase) -> C:
    """Wraps ``td`` in the tensorclass type of ``like``, with its non-tensor fields; returns ``td`` itself if ``like``
    is a tensordict.
    """
    return td if isinstance(like, TensorDictBase) else wrap(type(like), td, dict(like._non_tensordict))


def wrap(cls: type[C], td: TensorDictBase, fields: dict[str, Any] | None = None) -> C:
    """A tensorclass of this type around a tensordict, with these non-tensor fields."""
    return cls._from_tensordict(td, fields)


def non_tensor(value: Any) -> NonTensorData:
    """A Python object as an entry of a single row."""
    cell = object.__new__(NonTensorData)
    cell.__dict__["_tensordict"] = TensorDict._new_unsafe({}, batch_size=_SCALAR)
    cell.__dict__["_non_tensordict"] = {"data": value, "_is_non_tensor": True, "_metadata": None}
    cell.__dict__["_is_initialized"] = True
    return cell


def stack_cells(cells: Sequence[NonTensorData]) -> NonTensorStack:
    """A column made of the entries of single rows."""
    if not cells:
        return NonTensorStack(stack_dim=0)
    stack = NonTensorStack.__new__(NonTensorStack)
    LazyStackedTensorDict.__init__(stack, *cells)
    return stack


def column(values: Iterable[Any]) -> NonTensorStack:
    """A column of one Python object per row: ``td[i]``, slices, masks and ``torch.stack`` work on it.

    >>> column(["a", "b", "c"])[1:].tolist()
    ['b', 'c']
    """
    return stack_cells([non_tensor(value) for value in values])


def plain_value(value: Any) -> Any:
    """The Python object of a non-tensor entry of one row; other values unchanged."""
    return value.data if is_non_tensor(value) else value


def column_values(td: TensorDictBase, key: str) -> list[Any] | None:
    """The Python objects of a column, one per row; None if the batch has no such column.

    Reads  NonTensorStack [B], NonTensorData [B] (the same object for every row) or Tensor [B, ...] (as Python numbers)

    >>> td = TensorDict({"query": column(["a", "b"])}, batch_size=[2])
    >>> column_values(td, "query"), column_values(td, "answer")
    (['a', 'b'], None)
    """
    value = td.get(key, None)
    if value is None:
        return None
    if isinstance(value, LazyStackedTensorDict):
        return [
            cell._non_tensordict["data"]
            if isinstance(cell, NonTensorData)
            else (cell.tolist() if isinstance(cell, NonTensorStack) else cell)
            for cell in value.tensordicts
        ]
    if isinstance(value, NonTensorData):
        return [value.data] * (td.batch_size[0] if td.batch_size else 1)
    return value.tolist() if isinstance(value, Tensor) else list(value)


def present_keys(td: TensorDictBase) -> str:
    """The root keys of ``td`` as an error message lists them."""
    return ", ".join(sorted(map(repr, td.keys()))) or "none"


def required(td: TensorDictBase, key: NestedKey, reader: str, remedy: str = "", *, as_list: bool = False) -> Any:
    """``td[key]``; ``as_list``: ragged rows as a list. Raises MissingKeyError that names ``reader`` and the remedy."""
    value = td.get(key, None, as_list=True) if as_list else td.get(key, None)  # `Composite.get` has no ``as_list``
    if value is None:
        raise MissingKeyError(
            f"{reader}: reads {key!r}, which is missing; keys present: {present_keys(td)}{remedy and '; ' + remedy}."
        )
    return value


def row_values(values: Any, rows: int, reader: str) -> list[Hashable]:
    """A column of text or numbers, in any container, as one hashable value per row.

    Raises  ShapeError, prefixed with ``reader``, if the number of values is not ``rows``

    >>> row_values(np.array(["2 + 2?", "1 + 1?"]), 2, "me")
    ['2 + 2?', '1 + 1?']
    >>> row_values(torch.tensor([[7], [8]]), 2, "me"), row_values("2 + 2?", 2, "me")
    ([7, 8], ['2 + 2?', '2 + 2?'])
    """
    if isinstance(values, Tensor):
        flat = values.reshape(rows, -1)
        return flat[:, 0].tolist() if flat.shape[1] == 1 else [tuple(row) for row in flat.tolist()]
    data = values.data if is_tensorclass(values) else values
    if not isinstance(data, np.ndarray) and (is_tensorclass(values) or isinstance(data, str | int)):
        return [_hashable(data)] * rows  # one value for all rows
    data = data.tolist() if hasattr(data, "tolist") else data
    if len(data) != rows:
        raise ShapeError(f"{reader}: there must be one prompt per row: got {len(data)} for {rows} rows.")
    return [_hashable(value) for value in data]


def _hashable(value: Any) -> Hashable:
    """A cell as text or a number; several numbers as a tuple."""
    value = value.data if is_tensorclass(value) else value
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


# --- copies of rows of different lengths ------------------------------------------------------------------------------

# For these dtypes numpy copies row by row in two thirds of torch's time, because its views are cheaper.
_ARRAYS = {torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

Form = tuple[torch.dtype, torch.device, torch.Size | None]


class LazyCopy:
    """A lazy copy of rows: they stay in the memory of their owner, a replay buffer, until they are read.

    Most of a sample is read once, by padding it, which copies anyway: an eager copy would double the work. The rows
    are tensors without gradient, which the owner may replace but never changes in place.

    >>> owned = [torch.arange(2), torch.arange(3)]
    >>> rows = LazyCopy(owned, rows_form(owned))
    >>> rows.padded(value=-1, side="left").tolist()
    [[-1, 0, 1], [0, 1, 2]]
    >>> rows.copies()[0].zero_().tolist(), owned[0].tolist()
    ([0, 0], [0, 1])
    """

    __slots__ = ("_form", "_rows")

    def __init__(self, rows: Sequence[Tensor], form: Form | None) -> None:
        self._rows = rows
        self._form = form

    def __len__(self) -> int:
        return len(self._rows)

    def copies(self) -> list[Tensor]:
        return copy_rows(self._rows, self._form)

    def padded(self, value: float, side: str) -> Tensor:
        """Tensor[B, T, ...] as ``pad_rows`` returns it, with a single copy."""
        rows, form = self._rows, self._form
        if form is None or form[2] is None or form[0] not in _ARRAYS or form[1].type != "cpu":
            return pad_rows(rows, value=value, side=side)
        arrays = [row.numpy() for row in rows]
        sizes = [len(array) for array in arrays]
        longest = max(sizes)
        make = partial(np.full, fill_value=value) if value else np.zeros
        out = make((len(rows), longest, *form[2]), dtype=arrays[0].dtype)
        for place, array, size in zip(out, arrays, sizes, strict=True):
            place[slice(size) if side == "right" else slice(longest - size, longest)] = array
        return torch.from_numpy(out)

    def __reduce__(self) -> Any:
        return LazyCopy, (self.copies(), self._form)  # so that copy.copy does not share memory either


def rows_form(rows: Sequence[Tensor]) -> Form | None:
    """The dtype, device and shape beyond the first dimension that the rows have in common; one kernel can copy them.

    The shape is None for 0-d rows. Returns None for rows that differ.
    """
    kinds = {(type(row), row.dtype, row.device, row.layout, row.ndim) for row in rows}  # subclasses may override clone
    if len(kinds) != 1:
        return None
    kind, dtype, device, layout, dims = kinds.pop()
    if kind is not Tensor or layout is not torch.strided:
        return None
    if dims < 2:
        return dtype, device, None if not dims else rows[0].shape[1:]
    inner = {row.shape[1:] for row in rows}
    return (dtype, device, inner.pop()) if len(inner) == 1 else None


def copy_rows(rows: Sequence[Tensor], form: Form | None, device: torch.device | None = None) -> list[Tensor]:
    """Copies of the rows, which are views of one new block of memory if the rows have a common ``form``."""
    if form is None or len(rows) == 1:
        return [row.clone() if device is None else row.clone().to(device) for row in rows]
    flat = form[2] is None
    # One kernel and one allocation for all rows.
    block = torch.stack(rows) if flat else torch.cat(rows)
    block = block if device is None else block.to(device)
    return list(block.unbind(0) if flat else block.split_with_sizes([row.shape[0] for row in rows]))
