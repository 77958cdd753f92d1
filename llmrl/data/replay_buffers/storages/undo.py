"""Copies of the rows that a write replaces: if the writer is killed, the next process puts them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmrl.data.replay_buffers.storages.shared_folder import SharedFolder


class UndoLog:
    """The replaced rows of one write in files of a shared folder; as many bytes as the largest such write.

    The storage's lock guards it. Its counter ``replaced`` says how many rows the log holds; 0 outside of a write.
    """

    def __init__(self, folder: SharedFolder, columns: Sequence[Tensor]) -> None:
        self.columns = columns
        self._folder, self._room = folder, 0
        shapes = [((len(columns[0]),), torch.int64), *((column.shape, column.dtype) for column in columns)]
        self._files = [
            (folder.sparse(f"undo_{number}.bin", *kind), f"undo_{number}.bin") for number, kind in enumerate(shapes)
        ]

    def remember(self, index: int | slice | Tensor, length: int) -> int:
        """Copies the rows at ``index`` that exist, of ``length`` rows; returns their number."""
        if isinstance(index, slice):
            position = torch.arange(index.start, min(index.stop, length))
        else:
            position = torch.as_tensor(index).reshape(-1)
            position = position[position < length]
            position = position.unique() if len(position) > 1 else position
        if not (count := len(position)):
            return 0
        if count > self._room:
            for tensor, name in self._files:
                self._folder.take_space(name, count * tensor[0].numel() * tensor.itemsize)
            self._room = count
        (positions, _), *copies = self._files
        positions[:count] = position
        for column, (copy, _) in zip(self.columns, copies, strict=True):
            torch.index_select(column, 0, position, out=copy[:count])
        return count

    def put_back(self, count: int) -> None:
        """Writes the ``count`` rows of the log to where they were."""
        (positions, _), *copies = self._files
        for column, (copy, _) in zip(self.columns, copies, strict=True):
            column[positions[:count]] = copy[:count]
