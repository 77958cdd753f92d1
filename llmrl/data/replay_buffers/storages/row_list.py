"""Storages that keep rows in a growing Python list: any objects, and tensordicts of any length.

A tensordict is stored as a ``Row``, other objects as they are. Other modules use ``to_rows`` and ``from_rows`` too, to
keep rows outside a storage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.ragged.layout import (
    NUMBERS,
    Branch,
    Layout,
    LazyBranch,
    Leaf,
    TensorLeaf,
    copy_columns,
    copy_like,
    is_leaf,
    is_tree,
    put_rows_together,
    put_together,
    ragged_column,
    ragged_forms,
    take_apart,
    take_rows_apart,
    tree_map,
)
from llmrl.data.ragged.stack import LazyRows
from llmrl.data.ragged.tensordicts import LazyCopy, rows_form
from llmrl.data.replay_buffers.storages.base import Index, Storage, row_limit
from llmrl.errors import DataError

_SPARSE = 4  # a block is released once under a quarter of its rows is left: bounds memory with few extra copies


class Row(NamedTuple):
    """One row: its layout, its value in every column, and the ``ragged_forms`` of these if known."""

    layout: Layout
    leaves: tuple[Any, ...]
    forms: tuple[Any, ...] | None


def to_rows(batch: TensorDictBase | Sequence[Any], device: torch.device | None = None) -> list[Row]:
    """Copies of the rows of a batch, or of a list of single rows, that share no memory with it.

    The rows of a batch are copied with one kernel per entry, into one block of memory that is freed only with the last
    of them (see ``RowList._note_block``).
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
    forms = ragged_forms(layout, columns)
    copies = copy_columns(layout, columns, device, forms)
    if device is not None:  # a form includes the device, which has changed
        forms = ragged_forms(layout, copies)
    by_row = [_cells(*column) for column in zip(layout.kinds, copies, strict=True)]
    return [Row(layout, leaves, forms) for leaves in (zip(*by_row, strict=True) if by_row else [()] * num_rows)]


def _cells(kind: Any, column: Any) -> Sequence[Any]:
    if type(kind) is not TensorLeaf:
        return column
    if kind.shape.numel() == 1 and kind.dtype in NUMBERS and column.is_cpu:
        return column.flatten().tolist()
    return column.unbind(0)


def _columns(layout: Layout, rows: Sequence[Row], *, borrow: bool = False) -> list[Any]:
    """Copies of rows that share one layout, as columns."""
    forms = rows[0].forms
    known = forms if all([row.forms is forms or row.forms == forms for row in rows]) else None
    return copy_columns(layout, list(zip(*[row.leaves for row in rows], strict=True)), forms=known, borrow=borrow)


def to_row(single: Any, device: torch.device | None = None) -> Row:
    """A copy of one tensordict as a fixed-shape row, with the layout that such rows have in a dense batch."""
    layout, leaves = take_apart(single, stacked=False, device=device)
    return _rows(layout, [[leaf] for leaf in leaves], 1, device)[0]


@torch.no_grad()
def to_row_like(single: Any, layout: Layout) -> Row | None:
    """A copy of a single row with this layout; None if the row needs the general ``to_rows``."""
    leaves: list[Any] = []
    known = copy_like(layout.root, single, leaves)
    return Row(layout, tuple(leaves), None) if known else None


def from_rows(rows: Sequence[Row], *, lazy: bool = False, stack_dim: int = 0) -> TensorDictBase:
    """A batch made of copies of the rows.

    If the rows share one layout, the batch has the form in which they were written (a dense tensordict with ragged
    containers, or a lazy stack); otherwise, or with ``lazy``, it is a lazy stack of single rows.
    """
    layout = rows[0].layout
    lazy = lazy or type(layout.root) is LazyBranch
    if not lazy and stack_dim == 0 and all([row.layout is layout or row.layout == layout for row in rows]):
        return put_together(layout, _columns(layout, rows, borrow=True), len(rows))
    # If all rows have the same batch size, the stack's size is known without building rows; otherwise they are built.
    sizes = {_batch_size(row) for row in rows} if stack_dim == 0 else {None}
    if len(sizes) == 1 and None not in sizes:
        batch_size = torch.Size((len(rows), *sizes.pop()))
        return LazyRows.over(partial(single_rows, rows), batch_size, partial(_ragged_rows, rows))
    return LazyStackedTensorDict(*single_rows(rows), stack_dim=stack_dim)


def _batch_size(row: Row) -> torch.Size | None:
    root = row.layout.root
    if type(root) is LazyBranch:
        return row.leaves[0]
    return root.batch_size if type(root) is Branch else None


def _ragged_rows(rows: Sequence[Row], path: tuple[str, ...]) -> LazyCopy | None:
    """One ragged entry of all rows as a `LazyCopy`; None if it is not ragged or the rows differ in layout."""
    layout = rows[0].layout
    number = ragged_column(layout.root, path)
    if number is None or any([row.layout is not layout for row in rows]):
        return None
    column = [row.leaves[number] for row in rows]
    form = rows_form(column)
    return LazyCopy(column, form) if form is not None and form[2] is not None else None


def single_rows(rows: Sequence[Row]) -> list[Any]:
    """Copies of the rows as separate objects; rows that share a layout are copied together."""
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
    """Groups the indices of rows by layout; only layouts with the same kinds and root keys are compared."""
    # Most rows share a few layout objects, so identity is checked before equality.
    groups: dict[int, tuple[Layout, list[int]]] = {}  # id of a layout object -> the group of equal layouts
    alike: dict[Any, list[tuple[Layout, list[int]]]] = {}
    for position, row in enumerate(rows):
        layout = row.layout
        group = groups.get(id(layout))
        if group is None:
            others = alike.setdefault((layout.kinds, getattr(layout.root, "names", None)), [])
            group = next((other for other in others if other[0] == layout), None)
            if group is None:
                others.append(group := (layout, []))
            groups[id(layout)] = group
        group[1].append(position)
    return [group for others in alike.values() for group in others]


# --- storages ---


class RowList(Storage):
    """A list of rows with a size, a device, and the memory behind the rows; see the two storages below."""

    def __init__(self, max_size: int | None, device: torch.device | str | None) -> None:
        super().__init__()
        self.max_size = row_limit(type(self).__name__, max_size)
        self.device = None if device is None else torch.device(device)
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Any] = []
        self._blocks: list[_Block | None] = []  # block of the row at each position; None: the row has its own memory
        self._layouts: deque[Layout] = deque(maxlen=8)  # bounded: rows of many shapes have many layouts

    def empty(self) -> None:
        super().empty()
        self._forget()

    def _known(self, layout: Layout) -> Layout:
        """The equal layout object of earlier rows, if any, so that later checks can compare by identity."""
        for known in self._layouts:
            if known == layout:
                return known
        self._layouts.append(layout)
        return layout

    def _put(self, index: int | slice | Tensor, rows: list[Any]) -> None:
        self.counters.check_writable(type(self).__name__)
        where = positions(index, self.max_size)
        self._check_run(where, len(rows))
        held, rows = self._rows, self._with_known_layouts(rows)
        if isinstance(where, range):
            held[where.start : where.stop] = rows
        else:
            for position, row in zip(where, rows, strict=True):
                if position < len(held):
                    held[position] = row
                else:
                    held.append(row)
        for position in self._note_block(where):
            row = held[position]
            if type(row) is Row:
                held[position] = _rows(row.layout, [[leaf] for leaf in row.leaves], 1)[0]
            else:
                held[position] = copy_object(row)
        self.counters.length = len(self._rows)
        self.counters.changed()

    def _with_known_layouts(self, rows: list[Any]) -> list[Any]:
        """The rows with layouts replaced by equal objects of earlier rows (see `_known`)."""
        seen: dict[int, Layout] = {}
        out = []
        for row in rows:
            if type(row) is Row:
                layout = seen.get(id(row.layout))
                if layout is None:
                    layout = seen[id(row.layout)] = self._known(row.layout)
                if layout is not row.layout:
                    row = row._replace(layout=layout)
            out.append(row)
        return out

    def _note_block(self, where: Sequence[int]) -> list[int]:
        """Records which rows were written together; returns positions whose rows keep too much memory alive.

        Rows of one write share one block of memory per entry, because one copy is much faster than many. The block
        is freed only with its last row: a writer that keeps one row of every batch would keep all batches in memory.
        The caller copies the remaining rows of a mostly overwritten block, so that each has its own memory.
        """
        blocks = self._blocks
        block = _Block(where) if len(where) > 1 else None
        end = where.stop if isinstance(where, range) else max(where, default=-1) + 1
        blocks.extend([None] * (end - len(blocks)))
        if isinstance(where, range):
            replaced = blocks[where.start : where.stop]
            blocks[where.start : where.stop] = [block] * len(where)
        else:
            replaced = [blocks[position] for position in set(where)]
            for position in where:
                blocks[position] = block
        sparse: list[int] = []
        for old, count in Counter(replaced).items():
            if old is None:
                continue
            old.left -= count
            if 0 < old.left * _SPARSE < old.size:
                sparse += {position for position in old.where if blocks[position] is old}
        for position in sparse:
            blocks[position] = None
        return sparse


class ListStorage(RowList):
    """Python objects in a list, up to ``max_size`` of them (default: no limit).

    Tensors and tensordicts, also inside dicts, lists, tuples and dataclasses, are copied on writes and reads, and moved
    to ``device`` if given. Other objects are kept by reference, and dumped only if reading them back runs no code.

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

    def set(self, index: Index, data: Any, *, set_cursor: bool = True) -> None:
        index = self._places_at(index)
        if isinstance(index, int):
            rows = [self._kept(data)]
        elif isinstance(data, Tensor):
            rows = list(copy_object(data, self.device).unbind(0))
        elif _is_row(data) and data.batch_dims:
            rows = to_rows(data, self.device)
        else:
            rows = [self._kept(row) for row in _split(data)]
        self._put(index, rows)

    def get(self, index: Index) -> Any:
        index = self._rows_at(index)
        if isinstance(index, int):
            return _single(self._rows[index])
        rows = [self._rows[position] for position in positions(index, len(self))]
        if all([type(row) is Row for row in rows]):
            return single_rows(rows)
        return [_single(row) for row in rows]

    def batch(self, index: slice | Tensor) -> Any:
        """Stacked tensors, stacked tensordicts (lazily if they differ), or a list of other objects."""
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
        return to_row(value, self.device) if _is_row(value) else copy_object(value, self.device)


class LazyStackStorage(RowList):
    """Tensordicts whose entries may differ in shape from row to row, up to ``max_size`` of them (default: no limit).

    ``get`` returns a batch in the form in which the rows were written: a dense tensordict with ragged lazy stacks stays
    one; single rows and lazy stacks are returned as one lazy stack. Once rows of different layouts were written (other
    keys, or another shape of a dense entry), every batch is a lazy stack of single rows, until ``empty`` is called.
    ``stack_dim`` is the row dimension of lazy stacks. Tensors are copied, detached, and moved to ``device`` if given;
    Python values (strings, messages) are kept by reference.

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

    @property
    def _mixed(self) -> bool:
        """True once rows of different layouts were written."""
        return len(self._layouts) > 1

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
        if isinstance(index, int) and self._layouts and self.device is None:
            row = to_row_like(data, self._layouts[0])  # most rows have the layout that was written first
            if row is not None:
                return self._put(index, [row])
        singles = [data] if isinstance(index, int) else data
        if isinstance(singles, list):
            for row in singles:
                if not is_tensor_collection(row):
                    raise DataError(f"LazyStackStorage: a row must be a tensordict: got {_describe(row)}.")
        self._put(index, to_rows(singles, self.device))

    def get(self, index: Index) -> Any:
        index = self._rows_at(index)
        return single_rows([self._rows[index]])[0] if isinstance(index, int) else self.batch(index)

    def batch(self, index: slice | Tensor) -> Any:
        rows = [self._rows[position] for position in positions(index, len(self))]
        if not rows:
            raise IndexError(f"LazyStackStorage: the index must name a row: got {index} of {len(self)} rows.")
        return from_rows(rows, lazy=self._mixed, stack_dim=self.stack_dim)

    def _all_rows(self, copy: bool) -> Any:
        return from_rows(self._rows, lazy=self._mixed)


class _Block:
    """The rows of one write."""

    __slots__ = ("left", "size", "where")

    def __init__(self, where: Sequence[int]) -> None:
        self.where = where
        self.size = self.left = len(where) if isinstance(where, range) else len(set(where))


def copy_object(value: Any, device: torch.device | None = None) -> Any:
    """Copies the tensors and tensordicts in a value, detached; other objects are kept by reference."""
    if not is_leaf(value):
        return tree_map(lambda leaf: copy_object(leaf, device), value)
    if isinstance(value, Tensor) or is_tensor_collection(value):
        value = value.detach().clone()
    elif device is None or not hasattr(value, "to"):
        return value
    return value if device is None else value.to(device)


def _split(data: Any) -> list[Any]:
    """The single rows of a batch."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return list(data.unbind(0))
    if isinstance(data, list) or not is_tree(data):
        return list(data)
    leaves, spec = pytree.tree_flatten(data, is_leaf=is_leaf)
    rows = zip(*[_split(leaf) for leaf in leaves], strict=True)
    return [pytree.tree_unflatten(list(row), spec) for row in rows]


def positions(index: int | slice | Tensor | Sequence[int], length: int) -> Sequence[int]:
    """An index as non-negative positions: a range for contiguous positions, otherwise a list."""
    if isinstance(index, slice):
        run = range(*index.indices(length))
        return run if run.step == 1 else list(run)
    if isinstance(index, Tensor):
        return index.tolist()
    return [index] if isinstance(index, int) else list(index)


def _is_row(value: Any) -> bool:
    return is_tensor_collection(value) and not isinstance(value, NonTensorData)


def _single(row: Any) -> Any:
    return single_rows([row])[0] if type(row) is Row else copy_object(row)


def _describe(value: Any) -> str:
    if is_tensor_collection(value):
        return f"a {type(value).__name__} with batch size {list(value.batch_size)}"
    return f"a {type(value).__name__}"
