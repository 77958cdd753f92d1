"""A list of arbitrary Python objects: the storage that accepts anything."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.layout import Layout
from llmrl.data.replay_buffers.pytree import split
from llmrl.data.replay_buffers.rows import Row, from_rows, single_rows, to_row, to_rows
from llmrl.data.replay_buffers.storages.base import Index
from llmrl.data.replay_buffers.storages.row_list import RowList, copy_object, positions


class ListStorage(RowList):
    """Python objects in a list, up to ``max_size`` of them (default: no limit).

    Tensors and tensordicts are copied on the way in and out, also inside dicts, lists, tuples and dataclasses, and are
    moved to ``device`` if one is given. Any other object is kept by reference, and dumped only if it is data.

    >>> storage = ListStorage(3)
    >>> storage.set(0, "a string")
    >>> storage.set(slice(1, 3), [30, None])
    >>> storage.get(slice(0, 3))
    ['a string', 30, None]
    """

    def __init__(
        self, max_size: int | None = None, *, compilable: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__(max_size, device)

    def _forget(self) -> None:
        super()._forget()
        self._layouts: deque[Layout] = deque(maxlen=8)  # the latest; rows of many shapes have many

    def set(self, index: Index, data: Any, *, set_cursor: bool = True) -> None:
        index = self._places_at(index)
        if isinstance(index, int):
            self._put([index], [self._kept(data)])
        elif isinstance(data, Tensor):
            self._put(positions(index, self.max_size), list(copy_object(data, self.device).unbind(0)))
        elif _is_row(data) and data.batch_dims:
            self._put(positions(index, self.max_size), to_rows(data, self.device))
        else:
            self._put(positions(index, self.max_size), [self._kept(row) for row in split(data)])

    def get(self, index: Index) -> Any:
        index = self._rows_at(index)
        if isinstance(index, int):
            return _single(self._rows[index])
        rows = [self._rows[position] for position in positions(index, len(self))]
        if all([type(row) is Row for row in rows]):
            return single_rows(rows)
        return [_single(row) for row in rows]

    def batch(self, index: slice | Tensor) -> Any:
        """Tensors stacked, tensordicts stacked (lazily if they differ), anything else as a list."""
        rows = [self._rows[position] for position in positions(index, len(self))]
        kinds = {type(row) for row in rows}
        if len(kinds) == 1 and issubclass(next(iter(kinds)), Tensor):
            return torch.stack(rows)
        if kinds != {Row}:
            return [_single(row) for row in rows]
        layout = rows[0].layout
        if layout.dense and all([row.layout is layout for row in rows]):
            return from_rows(rows)
        return LazyStackedTensorDict.maybe_dense_stack(single_rows(rows))

    def _kept(self, value: Any) -> Any:
        """A copy of one object in the form in which it is stored."""
        return to_row(value, self.device) if _is_row(value) else copy_object(value, self.device)

    def _known(self, layout: Layout) -> Layout:
        for known in self._layouts:
            if known == layout:
                return known
        self._layouts.append(layout)
        return layout


def _is_row(value: Any) -> bool:
    return is_tensor_collection(value) and not isinstance(value, NonTensorData)


def _single(row: Any) -> Any:
    return single_rows([row])[0] if type(row) is Row else copy_object(row)
