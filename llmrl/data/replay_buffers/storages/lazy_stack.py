"""Tensordict rows of any length, read back as one batch: the storage for conversations."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.layout import Layout
from llmrl.data.replay_buffers.rows import from_rows, single_rows, to_row_like, to_rows
from llmrl.data.replay_buffers.storages.base import Index
from llmrl.data.replay_buffers.storages.row_list import RowList, positions
from llmrl.errors import DataError


class LazyStackStorage(RowList):
    """Tensordicts whose entries may differ in shape from row to row, up to ``max_size`` of them (default: no limit).

    ``get`` returns a batch in the form in which the rows were written: a dense tensordict whose ragged containers are
    lazy stacks comes back as such, single rows and lazy stacks come back as one lazy stack. Once rows of different
    layouts were written (other keys, or another shape of a dense entry), every batch is a lazy stack of single rows,
    whatever rows it holds; ``empty`` starts anew. ``stack_dim`` is where a lazy stack has its row dimension. Tensors
    are copied, detached, and moved to ``device`` if given; Python values (strings, messages) are kept by reference.

    >>> from tensordict import TensorDict
    >>> storage = LazyStackStorage(10)
    >>> storage.set(0, TensorDict(ids=torch.arange(3)))
    >>> storage.set(1, TensorDict(ids=torch.arange(5)))
    >>> [ids.tolist() for ids in storage.get(slice(0, 2)).get("ids", as_list=True)]
    [[0, 1, 2], [0, 1, 2, 3, 4]]
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: torch.device | str | None = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device)
        self.stack_dim = stack_dim

    def _forget(self) -> None:
        super()._forget()
        self._layout: Layout | None = None  # of all rows, as long as they have one
        self._mixed = False

    def count(self, data: Any) -> int:
        if isinstance(data, list):
            return len(data)
        if not is_tensor_collection(data) or not data.batch_dims:
            raise DataError(
                "LazyStackStorage: a batch is a tensordict with a batch dimension, or a list of tensordicts: got "
                f"{_describe(data)}."
            )
        return data.batch_size[0]

    def set(self, index: Index, data: Any, *, set_cursor: bool = True) -> None:
        index = self._places_at(index)
        if isinstance(index, int) and self._layout is not None and self.device is None:
            row = to_row_like(data, self._layout)
            if row is not None:
                return self._put([index], [row])
        singles = [data] if isinstance(index, int) else data
        if isinstance(singles, list):
            for row in singles:
                if not is_tensor_collection(row):
                    raise DataError(f"LazyStackStorage: a row must be a tensordict: got {_describe(row)}.")
        self._put(positions(index, self.max_size), to_rows(singles, self.device))

    def get(self, index: Index) -> Any:
        index = self._rows_at(index)
        if isinstance(index, int):
            return single_rows([self._rows[index]])[0]
        return self.batch(index)

    def batch(self, index: slice | Tensor) -> Any:
        rows = [self._rows[position] for position in positions(index, len(self))]
        if not rows:
            raise IndexError(f"LazyStackStorage: the index must name a row: got {index} of {len(self)} rows.")
        return from_rows(rows, lazy=self._mixed, stack_dim=self.stack_dim)

    def _all_rows(self, copy: bool) -> Any:
        return from_rows(self._rows, lazy=self._mixed)

    def _known(self, layout: Layout) -> Layout:
        if self._layout is None:
            self._layout = layout
        if layout == self._layout:
            return self._layout
        self._mixed = True
        return layout


def _describe(value: Any) -> str:
    if is_tensor_collection(value):
        return f"a {type(value).__name__} with batch size {list(value.batch_size)}"
    return f"a {type(value).__name__}"
