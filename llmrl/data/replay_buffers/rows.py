"""Single rows of batches, taken out by copy and joined by copy. The tree they hang on is ``layout.py``'s business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.replay_buffers.layout import (
    Layout,
    Leaf,
    copy_columns,
    put_rows_together,
    put_together,
    take_apart,
    take_rows_apart,
)


class Row(NamedTuple):
    """One row: its layout, and its share of every column."""

    layout: Layout
    leaves: tuple[Any, ...]


def to_rows(batch: TensorDictBase | Sequence[Any], device: torch.device | None = None) -> list[Row]:
    """Copies of the rows of a batch, or of a list of single rows, that share no memory with it.

    Rows of one batch share one kernel per entry and so one block of memory, which lives as long as any of them.
    """
    if isinstance(batch, list | tuple):
        parts = take_rows_apart(batch, device=device)
    else:
        parts = take_apart(batch, device=device)
        if parts[0].root is Leaf.ROW:  # rows with different keys or types: each has its own layout
            parts, batch = None, batch.unbind(0)
    if parts is None:
        return [_to_row(single, device) for single in batch]
    layout, columns = parts
    copies = copy_columns(layout, columns, device)
    by_row = [column.unbind(0) if isinstance(column, Tensor) else column for column in copies]
    return [Row(layout, leaves) for leaves in zip(*by_row, strict=True)]


def _to_row(single: Any, device: torch.device | None) -> Row:
    layout, columns = take_rows_apart([single], device=device) or (Layout(Leaf.ROW, (Leaf.ROW,)), [[single]])
    return Row(layout, tuple([column[0] for column in copy_columns(layout, columns, device)]))


def from_rows(rows: Sequence[Row], *, lazy: bool = False, stack_dim: int = 0) -> TensorDictBase:
    """A batch made of copies of the rows.

    It has the form that the rows were written in (a dense tensordict with ragged containers, or a lazy stack) if they
    share one layout, and is a lazy stack of single rows if they do not, or if ``lazy`` asks for it.
    """
    layout = rows[0].layout
    if not lazy and stack_dim == 0 and all([row.layout is layout or row.layout == layout for row in rows]):
        columns = copy_columns(layout, list(zip(*[row.leaves for row in rows], strict=True)))
        return put_together(layout, columns, len(rows))
    return LazyStackedTensorDict(*single_rows(rows), stack_dim=stack_dim)


def single_rows(rows: Sequence[Row]) -> list[Any]:
    """Copies of the rows, each on its own; rows that share a layout are copied together."""
    out: list[Any] = [None] * len(rows)
    for layout, where in _by_layout(rows):
        leaves = list(zip(*[rows[position].leaves for position in where], strict=True))
        singles = put_rows_together(layout, copy_columns(layout, leaves))
        for position, single in zip(where, singles, strict=True):
            out[position] = single
    return out


def pack(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as a state that ``torch.save`` writes: copies, one list per layout and entry."""
    groups = []
    for layout, where in _by_layout(rows):
        leaves = list(zip(*[rows[position].leaves for position in where], strict=True))
        groups.append({"layout": layout, "where": where, "columns": copy_columns(layout, leaves)})
    return {"size": len(rows), "groups": groups}


def unpack(state: dict[str, Any]) -> list[Row]:
    """Copies of the rows that ``pack`` wrote."""
    out: list[Any] = [None] * state["size"]
    for group in state["groups"]:
        layout = group["layout"]
        columns = copy_columns(layout, group["columns"])
        by_row = [column.unbind(0) if isinstance(column, Tensor) else column for column in columns]
        for position, leaves in zip(group["where"], zip(*by_row, strict=True), strict=True):
            out[position] = Row(layout, leaves)
    return out


def _by_layout(rows: Sequence[Row]) -> list[tuple[Layout, list[int]]]:
    groups: list[tuple[Layout, list[int]]] = []
    for position, row in enumerate(rows):
        for layout, where in groups:
            if row.layout is layout or row.layout == layout:
                where.append(position)
                break
        else:
            groups.append((row.layout, [position]))
    return groups
