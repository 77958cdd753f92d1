"""A lazy stack of B rows that is stored as columns until somebody asks for a row.

A batch of conversations is written and read column by column: lists of token rows, of strings, of masks. Building one
small TensorDict per row for each container would cost more than everything else the wrapper does, so ``RaggedStack``
builds them when they are first touched (``unbind``, a replay buffer, ``torch.stack``), and behaves as tensordict's own
lazy stack from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmrl.data.llm.non_tensor import column
from llmrl.data.ragged.lazy_copy import BorrowedRows

__all__ = ["RaggedStack", "stack_columns"]

_SCALAR = torch.Size([])


class RaggedStack(LazyStackedTensorDict):
    """A ``LazyStackedTensorDict`` over dimension 0 whose columns are Python lists with one value per row.

    A column is a list of B tensors of any shapes or of B strings, a Tensor[B, ...], or a tensor collection of batch [B,
    ...] (a ``History``). Rows that a buffer handed out are copied when they are first read; ``stack.get(key,
    as_padded_tensor=True)`` then pads them straight from the buffer.
    ``stack.get(key, as_list=True)`` is the list itself: read it, do not write into it.

    >>> rows = RaggedStack.from_columns({"ids": [torch.arange(2), torch.arange(3)]}, 2)
    >>> rows.get("ids", as_list=True)[1].tolist(), rows[0]["ids"].tolist(), rows[1:].batch_size
    ([0, 1, 2], [0, 1], torch.Size([1]))
    """

    _columns: dict[str, Any] | None = None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], num_rows: int) -> RaggedStack:
        """Takes the columns as they are, each ``num_rows`` long; one of tensors may be `BorrowedRows`."""
        if not num_rows:
            return cls(stack_dim=0)
        self = cls.__new__(cls)
        self._is_locked = None
        self.stack_dim = 0
        self.hook_out = self.hook_in = None
        self._batch_size = torch.Size([num_rows])
        self._columns = dict(columns)
        return self

    def own_columns(self) -> dict[str, Any] | None:
        """The columns, all of them in memory of their own; None once the rows hold the data."""
        columns = self._columns
        if columns is not None:
            for name, values in columns.items():
                if type(values) is BorrowedRows:
                    columns[name] = values.copies()
        return columns

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        """The rows as tensordicts. The first access builds them; from then on they, not the columns, hold the data."""
        rows = self.__dict__.get("_rows")
        if rows is None:
            columns = {name: _cells(values) for name, values in self.own_columns().items()}
            rows = self.__dict__["_rows"] = [
                TensorDict._new_unsafe(dict(zip(columns, cells, strict=True)), batch_size=_SCALAR)
                for cells in zip(*columns.values(), strict=True)
            ] or [TensorDict._new_unsafe({}, batch_size=_SCALAR) for _ in range(self._batch_size[0])]
            self._columns = None
        return rows

    @tensordicts.setter
    def tensordicts(self, rows: list[TensorDictBase]) -> None:
        self.__dict__["_rows"] = rows
        self._columns = None

    def keys(self, include_nested: bool = False, leaves_only: bool = False, is_leaf: Any = None, *, sort: bool = False):
        if self._columns is None or include_nested or leaves_only or is_leaf is not None:
            return super().keys(include_nested, leaves_only, is_leaf, sort=sort)
        return self._columns.keys()

    @property
    def device(self) -> torch.device | None:
        return None if self._columns is not None else super().device

    @device.setter
    def device(self, value: Any) -> None:
        for row in self.tensordicts:
            row.device = value

    @property
    def is_locked(self) -> bool:
        return False if self._columns is not None and self._is_locked is None else super().is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    def _has_names(self) -> bool:
        return False if self._columns is not None else super()._has_names()

    def _get_str(self, key: str, default: Any = None, **kwargs: Any) -> Any:
        values = None if self._columns is None else self._columns.get(key)
        if type(values) is BorrowedRows:
            if kwargs.get("as_padded_tensor", False) and not kwargs.get("as_list", False):
                return values.padded(kwargs.get("padding_value", 0.0), kwargs.get("padding_side", "right"))
            values = self._columns[key] = values.copies()
        if values is not None:
            as_list = kwargs.get("as_list", False)
            if not isinstance(values, list):
                return list(values.unbind(0)) if as_list else values
            if as_list:
                return values
            if isinstance(values[0], str):
                return column(values)
            if kwargs.get("as_padded_tensor", False):
                side, fill = kwargs.get("padding_side", "right"), kwargs.get("padding_value", 0.0)
                return pad_sequence(values, batch_first=True, padding_value=fill, padding_side=side)
        elif self._columns is not None and key not in self._columns:
            return self._default_get(key, default)
        return super()._get_str(key, default, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        if self._columns is not None:
            rows = _row_numbers(index, self._batch_size[0])
            if rows is not None:
                columns = {
                    name: [values[row] for row in rows] if isinstance(values, list) else values[index]
                    for name, values in self.own_columns().items()
                }
                return type(self).from_columns(columns, len(rows))
        return super().__getitem__(index)

    def _clone(self, recurse: bool = True) -> RaggedStack:
        if self._columns is None:
            return super()._clone(recurse)
        columns = {name: _clone_column(values, recurse) for name, values in self.own_columns().items()}
        return type(self).from_columns(columns, self._batch_size[0])


def stack_columns(columns: Mapping[str, Any], batch_size: Sequence[int]) -> TensorDictBase:
    """Columns of ``prod(batch_size)`` values each as a tensordict of that batch size; one row alone is a plain
    TensorDict.
    """
    if not len(batch_size):
        return TensorDict._new_unsafe({name: _cells(values)[0] for name, values in columns.items()}, batch_size=_SCALAR)
    if len(batch_size) == 1:
        return RaggedStack.from_columns(columns, batch_size[0])
    inner = torch.Size(batch_size[1:]).numel()
    return LazyStackedTensorDict(
        *[
            stack_columns(
                {name: values[row * inner : (row + 1) * inner] for name, values in columns.items()}, batch_size[1:]
            )
            for row in range(batch_size[0])
        ]
    )


def _cells(values: Any) -> Sequence[Any]:
    if not isinstance(values, list):
        return values.unbind(0)
    return column(values).tensordicts if isinstance(values[0], str) else values


def _clone_column(values: Any, recurse: bool) -> Any:
    if isinstance(values, Tensor):
        return values.clone() if recurse else values
    if not isinstance(values, list):
        return values.clone(recurse)
    if recurse and not isinstance(values[0], str):
        return [value.clone() for value in values]
    return list(values)


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
