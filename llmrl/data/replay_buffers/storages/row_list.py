"""Rows in a Python list, which grows as they come. What may be a row, and how rows are read, is the storages' business.

A tensordict is kept as its ``Row`` (``rows.py``), anything else as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.layout import Layout
from llmrl.data.replay_buffers.pytree import is_leaf, tree_map
from llmrl.data.replay_buffers.rows import Row, copy_row, with_layouts
from llmrl.data.replay_buffers.storages.base import Storage, row_limit
from llmrl.data.replay_buffers.storages.row_memory import Blocks


class RowList(Storage):
    """What storages of any objects and of tensordicts share: a list, a size, a device, and the memory behind rows."""

    def __init__(self, max_size: int | None, device: torch.device | str | None) -> None:
        super().__init__()
        self.max_size = row_limit(type(self).__name__, max_size)
        self.device = None if device is None else torch.device(device)
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Any] = []
        self._blocks = Blocks()

    def empty(self) -> None:
        super().empty()
        self._forget()

    @abstractmethod
    def _known(self, layout: Layout) -> Layout:
        """The equal layout that earlier rows have, so that equal ones need no comparing."""

    def _put(self, where: Sequence[int], rows: list[Any]) -> None:
        self.ring.check_writable(type(self).__name__)
        self._check_run(where, len(rows))
        _place(self._rows, where, with_layouts(rows, self._known))
        for position in self._blocks.write(where):
            row = self._rows[position]
            self._rows[position] = copy_row(row) if type(row) is Row else copy_object(row)
        self.ring.length = len(self._rows)
        self.ring.changed()


def copy_object(value: Any, device: torch.device | None = None) -> Any:
    """Any object, with copies of the tensors in it."""
    if not is_leaf(value):
        return tree_map(lambda leaf: copy_object(leaf, device), value)
    if isinstance(value, Tensor) or is_tensor_collection(value):
        value = value.detach().clone()
    elif device is None or not hasattr(value, "to"):
        return value
    return value if device is None else value.to(device)


def positions(index: int | slice | Tensor | Sequence[int], length: int) -> Sequence[int]:
    """An index as non-negative positions: a run as a range, anything else as a list."""
    if isinstance(index, slice):
        run = range(*index.indices(length))
        return run if run.step == 1 else list(run)
    if isinstance(index, Tensor):
        return index.tolist()
    return [index] if isinstance(index, int) else list(index)


def _place(held: list[Any], where: Sequence[int], rows: Sequence[Any]) -> None:
    """Puts rows at positions of a list that leave no gap."""
    if isinstance(where, range):
        held[where.start : where.stop] = rows
        return
    for position, row in zip(where, rows, strict=True):
        if position < len(held):
            held[position] = row
        else:
            held.append(row)
