"""The ragged stack: a lazy stack of rows that is stored as columns until a row is read.

A rollout writes and reads thousands of conversations column by column. One small TensorDict per row and container would
cost more than the rest of the step, so the rows are built on first access (``unbind``, ``torch.stack``, a write).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmrl.data.ragged.padding import pad_rows
from llmrl.data.ragged.tensordicts import column, new_tensordict, non_tensor

__all__ = ["BorrowedRows", "LazyRows", "RaggedStack", "copy_rows", "rows_form", "stack_columns"]


class LazyRows(LazyStackedTensorDict):
    """A lazy stack over dimension 0 that builds its rows from ``source`` on first access.

    A subclass answers from the source what it can (`_names`, ``_get_str``, ``__getitem__``) and builds the rest in
    `_build`. From the first access on, the rows hold the data and this is an ordinary lazy stack.
    """

    source: Any = None  # None once the rows are built

    @classmethod
    def over(cls, source: Any, num_rows: int) -> Self:
        """A stack of ``num_rows`` rows without further batch dimensions; the source is kept, not copied."""
        self = cls.__new__(cls)
        self._is_locked = None
        self.stack_dim = 0
        self.hook_out = self.hook_in = None
        self._batch_size = torch.Size([num_rows])
        self.source = source
        return self

    def _build(self) -> list[TensorDictBase]:
        raise NotImplementedError

    def _names(self) -> Any:
        """The keys of the entries, in a view as of ``dict.keys()``."""
        raise NotImplementedError

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        if self.source is not None:
            self._rows = self._build()
            self.source = None
            if self._is_locked:
                for row in self._rows:
                    row._propagate_lock(is_compiling=False)
        return self._rows

    @tensordicts.setter
    def tensordicts(self, rows: Sequence[TensorDictBase]) -> None:
        self._rows = list(rows)
        self.source = None

    # What every container asks of its entries, answered without building rows.

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        if self.source is None or args or kwargs:
            return super().keys(*args, **kwargs)
        return self._names()

    @property
    def device(self) -> torch.device | None:
        return None if self.source is not None else super().device

    @device.setter
    def device(self, value: Any) -> None:
        LazyStackedTensorDict.device.fset(self, value)

    @property
    def names(self) -> list[str | None]:
        return [self._td_dim_name] if self.source is not None else super().names

    @names.setter
    def names(self, value: Sequence[str] | None) -> None:
        self._set_names(value)

    def _has_names(self) -> bool:
        return self.source is None and super()._has_names()

    @property
    def _is_memmap(self) -> bool:
        return self.source is None and super()._is_memmap

    @property
    def _is_shared(self) -> bool:
        return self.source is None and super()._is_shared

    @property
    def is_locked(self) -> bool:
        return bool(self._is_locked) if self.source is not None else super().is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        if self.source is not None:
            self._is_locked = True
        else:
            super()._propagate_lock(lock_parents_weakrefs, is_compiling=is_compiling)

    def _propagate_unlock(self) -> list[Any]:
        if self.source is None:
            return super()._propagate_unlock()
        self._is_locked = None
        return []


class RaggedStack(LazyRows):
    """Rows as columns: each a list of B tensors of any shapes or of B strings, a Tensor[B, ...], or a collection [B].

    Columns that are `BorrowedRows` are copied when they are first read; ``stack.get(key, as_padded_tensor=True)`` pads
    them straight from their owner. ``stack.get(key, as_list=True)`` is the list itself: to be read only.

    >>> rows = RaggedStack.from_columns({"ids": [torch.arange(2), torch.arange(3)]}, 2)
    >>> rows.get("ids", as_list=True)[1].tolist(), rows[0]["ids"].tolist(), rows[1:].batch_size
    ([0, 1, 2], [0, 1], torch.Size([1]))
    """

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], num_rows: int) -> RaggedStack:
        """Takes the columns as they are, each ``num_rows`` long; one of tensors may be `BorrowedRows`."""
        return cls.over(dict(columns), num_rows) if num_rows else cls(stack_dim=0)

    def own_columns(self) -> dict[str, Any] | None:
        """The columns, all of them in memory of their own; None once the rows hold the data."""
        for name, values in (self.source or {}).items():
            if type(values) is BorrowedRows:
                self.source[name] = values.copies()
        return self.source

    def _build(self) -> list[TensorDictBase]:
        columns = {name: _cells(values) for name, values in self.own_columns().items()}
        rows = [new_tensordict(dict(zip(columns, cells, strict=True))) for cells in zip(*columns.values(), strict=True)]
        return rows or [new_tensordict({}) for _ in range(self._batch_size[0])]

    def _names(self) -> Any:
        return self.source.keys()

    def _get_str(self, key: str, default: Any = None, **kwargs: Any) -> Any:
        if self.source is None:
            return super()._get_str(key, default, **kwargs)
        if key not in self.source:
            return self._default_get(key, default)
        values, as_list = self.source[key], kwargs.get("as_list", False)
        padding = kwargs.get("padding_value", 0.0), kwargs.get("padding_side", "right")
        pads = kwargs.get("as_padded_tensor", False) and not as_list
        if type(values) is BorrowedRows:
            if pads:
                return values.padded(*padding)
            values = self.source[key] = values.copies()
        if not isinstance(values, list):
            return list(values.unbind(0)) if as_list else values
        if as_list:
            return values
        if isinstance(values[0], str):
            return column(values)
        if pads:
            return pad_sequence(values, batch_first=True, padding_value=padding[0], padding_side=padding[1])
        return super()._get_str(key, default, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        rows = None if self.source is None else _row_numbers(index, self._batch_size[0])
        if rows is None:
            return super().__getitem__(index)
        columns = {
            name: [values[row] for row in rows] if isinstance(values, list) else values[index]
            for name, values in self.own_columns().items()
        }
        return type(self).from_columns(columns, len(rows))

    def _clone(self, recurse: bool = True) -> RaggedStack:
        if self.source is None:
            return super()._clone(recurse)
        columns = {name: _clone_column(values, recurse) for name, values in self.own_columns().items()}
        return type(self).from_columns(columns, self._batch_size[0])


def stack_columns(columns: Mapping[str, Any], batch_size: Sequence[int]) -> TensorDictBase:
    """Columns of ``prod(batch_size)`` values as a tensordict of that batch size; a single row is a plain TensorDict."""
    if not len(batch_size):
        return new_tensordict({name: _cells(values)[0] for name, values in columns.items()})
    if len(batch_size) == 1:
        return RaggedStack.from_columns(columns, batch_size[0])
    size = torch.Size(batch_size[1:]).numel()
    parts = [slice(row * size, (row + 1) * size) for row in range(batch_size[0])]
    return LazyStackedTensorDict(
        *[stack_columns({name: values[part] for name, values in columns.items()}, batch_size[1:]) for part in parts]
    )


def _cells(values: Any) -> Sequence[Any]:
    if not isinstance(values, list):
        return values.unbind(0)
    return [non_tensor(value) for value in values] if isinstance(values[0], str) else values


def _clone_column(values: Any, recurse: bool) -> Any:
    if isinstance(values, Tensor):
        return values.clone() if recurse else values
    if not isinstance(values, list):
        return values.clone(recurse)
    return [value.clone() for value in values] if recurse and not isinstance(values[0], str) else list(values)


def _row_numbers(index: Any, num_rows: int) -> list[int] | None:
    """The rows that an index along the first dimension selects; None for every other kind of index."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, slice):
        return list(range(num_rows))[index]
    if isinstance(index, Tensor) and index.ndim == 1 and index.numel():
        if index.dtype == torch.bool:
            return index.nonzero().squeeze(1).tolist() if index.shape[0] == num_rows else None
        return None if index.dtype.is_floating_point else index.tolist()
    if isinstance(index, list | range) and index and all(type(row) is int for row in index):
        return list(index)
    return None


# --- rows in another's memory -----------------------------------------------------------------------------------------

# numpy copies these row by row in two thirds of the time that torch takes, because its views are cheaper.
_ARRAYS = {torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

Form = tuple[torch.dtype, torch.device, torch.Size | None]


class BorrowedRows:
    """Rows that stay in the memory of their owner, a replay buffer, until they are read; only copies of them come out.

    Most of a sample is read once, and padded: a copy that is only copied again would be half of the work. The rows are
    tensors without gradient, which the owner replaces but never changes.

    >>> owned = [torch.arange(2), torch.arange(3)]
    >>> rows = BorrowedRows(owned, rows_form(owned))
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
        """Tensor[B, T, ...] as of ``pad_rows``, with a single copy."""
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
        return BorrowedRows, (self.copies(), self._form)  # also a copy.copy has its own memory


def rows_form(rows: Sequence[Tensor]) -> Form | None:
    """The common dtype, device and shape after the first dimension of rows that one kernel can copy.

    The shape is None for rows without dimensions. None for rows that differ.
    """
    kinds = {(type(row), row.dtype, row.device, row.layout, row.ndim) for row in rows}
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
    """Copies: views of one fresh block of memory if the rows have a common ``form``."""
    if form is None:
        return [row.clone() if device is None else row.clone().to(device) for row in rows]
    if len(rows) == 1:
        return [rows[0].clone() if device is None else rows[0].clone().to(device)]
    flat = form[2] is None
    block = torch.stack(rows) if flat else torch.cat(rows)
    block = block if device is None else block.to(device)
    return list(block.unbind(0) if flat else block.split_with_sizes([row.shape[0] for row in rows]))
