"""Single rows of batches, taken out by copy and joined by copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from llmrl.data.ragged.stack import BorrowedRows, rows_form
from llmrl.data.replay_buffers.layout import (
    NUMBERS,
    Branch,
    Layout,
    LazyBranch,
    Leaf,
    TensorLeaf,
    copy_columns,
    copy_like,
    put_rows_together,
    put_together,
    ragged_column,
    ragged_forms,
    take_apart,
    take_rows_apart,
)
from llmrl.data.replay_buffers.lazy_rows import DeferredStack


class Row(NamedTuple):
    """One row: its layout, its share of every column, and the ``ragged_forms`` of these if they are known."""

    layout: Layout
    leaves: tuple[Any, ...]
    forms: tuple[Any, ...] | None


def to_rows(batch: TensorDictBase | Sequence[Any], device: torch.device | None = None) -> list[Row]:
    """Copies of the rows of a batch, or of a list of single rows, that share no memory with it.

    Rows of one batch share one kernel per entry and so one block of memory, which lives as long as any of them
    (``storages/row_list.py``).
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
    return _rows(layout, columns, len(batch), device)


def _to_row(single: Any, device: torch.device | None) -> Row:
    layout, columns = take_rows_apart([single], device=device) or (Layout(Leaf.ROW, (Leaf.ROW,)), [[single]])
    return _rows(layout, columns, 1, device)[0]


@torch.no_grad()
def _rows(layout: Layout, columns: Sequence[Any], num_rows: int, device: torch.device | None = None) -> list[Row]:
    """Copies of columns, as rows."""
    forms = ragged_forms(layout, columns)
    copies = copy_columns(layout, columns, device, forms)
    if device is not None:
        forms = ragged_forms(layout, copies)
    by_row = [_cells(*column) for column in zip(layout.kinds, copies, strict=True)]
    return [Row(layout, leaves, forms) for leaves in (zip(*by_row, strict=True) if by_row else [()] * num_rows)]


def _cells(kind: Any, column: Any) -> Sequence[Any]:
    """The share of every row of a column."""
    if type(kind) is not TensorLeaf:
        return column
    if kind.shape.numel() == 1 and kind.dtype in NUMBERS and column.is_cpu:
        return column.flatten().tolist()
    return column.unbind(0)


def _columns(layout: Layout, rows: Sequence[Row], *, borrow: bool = False) -> list[Any]:
    """Copies of rows of one layout, as columns."""
    forms = rows[0].forms
    known = forms if all([row.forms is forms or row.forms == forms for row in rows]) else None
    return copy_columns(layout, list(zip(*[row.leaves for row in rows], strict=True)), forms=known, borrow=borrow)


def to_row(single: Any, device: torch.device | None = None) -> Row:
    """A copy of one tensordict as a row of fixed shape, with the layout that rows like it have in a dense batch."""
    layout, leaves = take_apart(single, stacked=False, device=device)
    return _rows(layout, [[leaf] for leaf in leaves], 1, device)[0]


@torch.no_grad()
def to_row_like(single: Any, layout: Layout) -> Row | None:
    """A copy of a single row of this layout; None where ``to_rows`` has to look."""
    leaves: list[Any] = []
    known = copy_like(layout.root, single, leaves)
    return Row(layout, tuple(leaves), None) if known else None


def copy_row(row: Row) -> Row:
    """The same row in memory of its own."""
    return _rows(row.layout, [[leaf] for leaf in row.leaves], 1)[0]


def with_layouts(rows: Sequence[Any], known: Callable[[Layout], Layout]) -> list[Any]:
    """The rows with the layout that ``known`` gives for theirs, which is asked once per layout object.

    Other values stay as they are.
    """
    seen: dict[int, Layout] = {}
    out = []
    for row in rows:
        if type(row) is Row:
            layout = seen.get(id(row.layout))
            if layout is None:
                layout = seen[id(row.layout)] = known(row.layout)
            if layout is not row.layout:
                row = row._replace(layout=layout)
        out.append(row)
    return out


def from_rows(rows: Sequence[Row], *, lazy: bool = False, stack_dim: int = 0) -> TensorDictBase:
    """A batch made of copies of the rows.

    It has the form that the rows were written in (a dense tensordict with ragged containers, or a lazy stack) if they
    share one layout, and is a lazy stack of single rows if they do not, or if ``lazy`` asks for it.
    """
    layout = rows[0].layout
    lazy = lazy or type(layout.root) is LazyBranch
    if not lazy and stack_dim == 0 and all([row.layout is layout or row.layout == layout for row in rows]):
        return put_together(layout, _columns(layout, rows, borrow=True), len(rows))
    sizes = {_batch_size(row) for row in rows} if stack_dim == 0 else {None}
    if len(sizes) == 1 and None not in sizes:
        batch_size = torch.Size((len(rows), *sizes.pop()))
        return DeferredStack.of(partial(single_rows, rows), batch_size, partial(_ragged_rows, rows))
    return LazyStackedTensorDict(*single_rows(rows), stack_dim=stack_dim)


def _batch_size(row: Row) -> torch.Size | None:
    """The batch size of a single row; None where only the row itself can tell."""
    root = row.layout.root
    if type(root) is LazyBranch:
        return row.leaves[0]
    return root.batch_size if type(root) is Branch else None


def _ragged_rows(rows: Sequence[Row], path: tuple[str, ...]) -> BorrowedRows | None:
    """One entry of all rows, where it is a tensor with a length of its own in each."""
    layout = rows[0].layout
    number = ragged_column(layout.root, path)
    if number is None or any([row.layout is not layout for row in rows]):
        return None
    column = [row.leaves[number] for row in rows]
    form = rows_form(column)
    return BorrowedRows(column, form) if form is not None and form[2] is not None else None


def single_rows(rows: Sequence[Row]) -> list[Any]:
    """Copies of the rows, each on its own; rows that share a layout are copied together."""
    out: list[Any] = [None] * len(rows)
    for layout, where in _by_layout(rows):
        singles = put_rows_together(layout, _columns(layout, [rows[position] for position in where]), len(where))
        for position, single in zip(where, singles, strict=True):
            out[position] = single
    return out


def pack(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as a state that ``torch.save`` writes: copies, one list per layout and entry."""
    groups = []
    for layout, where in _by_layout(rows):
        columns = _columns(layout, [rows[position] for position in where])
        groups.append({"layout": layout, "where": where, "columns": columns})
    return {"size": len(rows), "groups": groups}


def unpack(state: dict[str, Any]) -> list[Row]:
    """Copies of the rows that ``pack`` wrote."""
    out: list[Any] = [None] * state["size"]
    for group in state["groups"]:
        where = group["where"]
        for position, row in zip(where, _rows(group["layout"], group["columns"], len(where)), strict=True):
            out[position] = row
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
