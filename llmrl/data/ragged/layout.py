"""Splits a batch of tensordicts into a layout and columns, and rebuilds batches from columns.

A batch is a tree (tensordicts, tensorclasses, lazy stacks, dicts, dataclasses) over flat entries. ``take_apart``
separates the two: a ``Layout`` (the tree, comparable with ``==``) and one *column* per entry. Storages keep columns, or
rows of them, and need not inspect tensordicts; ``put_together`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_non_tensor, is_tensorclass
from tensordict.base import is_tensor_collection
from tensordict.tensorclass import NonTensorStack
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.ragged.stack import LazyRows
from llmrl.data.ragged.tensordicts import LazyCopy, bare_tensordict, copy_rows, non_tensor, rows_form

_EMPTY = torch.Size([])

# dtypes that a Python number represents exactly, with numpy's dtype: one tensor object per number takes 10x the memory.
NUMBERS = {torch.bool: np.bool_, torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16}
NUMBERS |= {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class TensorLeaf(NamedTuple):
    """A tensor entry with one shape for every row. Column: tensor[B, *shape]."""

    shape: torch.Size
    dtype: torch.dtype


class Leaf(Enum):
    """The other kinds of entry. Column: a list of B values."""

    RAGGED = "ragged"  # tensors whose shape may differ from row to row
    DATA = "data"  # Python values; for conversations, their lists of messages
    ROW = "row"  # tensor collections that are kept whole
    SIZE = "size"  # the batch size of a row of a lazy stack


class Branch(NamedTuple):
    """A dense tensordict; ``batch_size`` excludes the row dimension."""

    names: tuple[str, ...]
    children: tuple[Any, ...]
    batch_size: torch.Size
    device: torch.device | None


class LazyBranch(NamedTuple):
    """A lazy stack of tensordicts that have the same keys; rows may differ in shape and batch size."""

    names: tuple[str, ...]
    children: tuple[Any, ...]
    device: torch.device | None


class Columns(NamedTuple):
    """A lazy stack class that stores columns itself.

    ``own_columns()`` returns a dict or None; ``from_columns(columns, num_rows)`` also accepts `LazyCopy` columns.
    """

    cls: type
    names: tuple[str, ...]
    children: tuple[Any, ...]


class Messages(NamedTuple):
    """One conversation per row: ``cls`` has ``messages``, which is read-only, and ``from_messages(list)``."""

    cls: type


class Wrapped(NamedTuple):
    """A tensorclass around a tree, with its non-tensor fields."""

    cls: type
    inner: Any
    fields: dict[str, Any]


class Tree(NamedTuple):
    """A dict, tuple or list of the above."""

    spec: pytree.TreeSpec
    children: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return _tree, tuple(self)


def _tree(spec: pytree.TreeSpec, children: tuple[Any, ...]) -> Tree:
    register_dataclasses(spec)  # unpickling may happen in a process that has not registered them yet
    return Tree(spec, children)


class Layout(NamedTuple):
    """The structure of a batch without its entries: the tree, and the kind of every column in order."""

    root: Any
    kinds: tuple[Any, ...]

    @property
    def dense(self) -> bool:
        """True if every entry has one shape for all rows, so that columns can be preallocated."""
        return all(type(kind) is TensorLeaf or kind is Leaf.DATA for kind in self.kinds)


# --- trees: dicts, tuples, lists and dataclasses of tensors, tensordicts and Python values ---------------------------


def is_tree(value: Any) -> bool:
    """True for a container whose entries are rows, or columns of them; dataclasses count."""
    if isinstance(value, dict | tuple | list):
        return True
    if isinstance(value, type) or not is_dataclass(value) or is_tensor_collection(value):
        return False
    _register_dataclass(type(value))
    return True


def register_dataclasses(spec: pytree.TreeSpec) -> None:
    """Registers the dataclasses of a spec with pytree, so that this process can build trees of this form."""
    if is_dataclass(spec.type):
        _register_dataclass(spec.type)
    for child in spec.children():
        register_dataclasses(child)


def _register_dataclass(cls: type) -> None:
    if cls not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(cls)


def is_leaf(value: Any) -> bool:
    return not is_tree(value)


def tree_leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=is_leaf)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map(function, value, is_leaf=is_leaf)


# --- apart ---------------------------------------------------------------------------------------------------------


def take_apart(
    batch: Any, *, stacked: bool = True, device: torch.device | None = None, keep_names: bool = True
) -> tuple[Layout, list[Any]]:
    """Splits a batch (``stacked``: the leading dimension counts rows) or a single row into layout and columns.

    The columns are the entries themselves, not copies (see ``copy_columns``). The layout records ``device`` as the
    device of every tensordict, for columns that will be stored there; with None it records the batch's own devices.
    A tensordict with named dimensions is kept whole, so that the names survive, unless ``keep_names`` is False.
    """
    visitor = _Visitor(stacked, device, keep_names)
    return Layout(visitor.visit(batch), tuple(visitor.kinds)), visitor.columns


def take_rows_apart(rows: Sequence[Any], *, device: torch.device | None = None) -> tuple[Layout, list[Any]] | None:
    """Splits a sequence of single rows as `take_apart` does; None if they do not share one layout."""
    visitor = _Visitor(True, device)
    root = visitor.visit_rows(rows)
    return None if root is Leaf.ROW else (Layout(root, tuple(visitor.kinds)), visitor.columns)


class _Visitor:
    """One walk over a batch: collects columns and their kinds in order, returns the tree."""

    __slots__ = ("columns", "device", "keep_names", "kinds", "stacked")

    def __init__(self, stacked: bool, device: torch.device | None, keep_names: bool = True) -> None:
        self.stacked = stacked
        self.keep_names = keep_names
        self.device = device
        self.columns: list[Any] = []
        self.kinds: list[Any] = []

    def visit(self, value: Any) -> Any:
        stacked = self.stacked
        if isinstance(value, Tensor):
            return self._leaf(TensorLeaf(value.shape[1:] if stacked else value.shape, value.dtype), value)
        kind = type(value)
        if kind is TensorDict and not (self.keep_names and value._has_names()):
            entries = value._tensordict
            names = tuple(sorted(entries))  # layouts must compare equal whatever the order of the keys
            children = tuple([self.visit(entries[name]) for name in names])
            size = value.batch_size
            return Branch(names, children, size[1:] if stacked else size, self.device or value.device)
        if kind is NonTensorData:
            data = _data_of(value)
            return self._leaf(Leaf.DATA, [data] * len(value) if stacked else data)
        if not is_tensor_collection(value):
            if is_tree(value):
                leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
                return Tree(spec, tuple([self.visit(leaf) for leaf in leaves]))
            return self._leaf(Leaf.DATA, [value] if stacked else value)
        if is_tensorclass(value):
            return Wrapped(kind, self.visit(value.__dict__["_tensordict"]), dict(value.__dict__["_non_tensordict"]))
        if not stacked:
            if hasattr(kind, "from_messages"):
                self._leaf(Leaf.DATA, list(value.messages))
                return Messages(kind)
            return self._leaf(Leaf.ROW, value)
        entries = value.own_columns() if hasattr(kind, "from_columns") else None
        if entries is not None:
            names = tuple(sorted(entries))
            return Columns(kind, names, tuple([self._visit_entry(entries[name]) for name in names]))
        # A plain stack already holds its rows; other stacks apply a hook to them or stack along another dimension.
        plain = kind in (LazyStackedTensorDict, NonTensorStack, LazyRows) and value.hook_out is None
        return self.visit_rows(value.tensordicts if plain and value.stack_dim == 0 else value.unbind(0))

    def visit_rows(self, rows: Sequence[Any]) -> Any:
        # Rows become columns only if they all have the same tree; otherwise they are kept whole.
        first = rows[0]
        kind = type(first)
        if any([type(row) is not kind for row in rows]):
            return self._leaf(Leaf.ROW, list(rows))
        if kind is TensorDict:
            entries = [row._tensordict for row in rows]
            keys = entries[0].keys()
            if all([entry.keys() == keys for entry in entries]) and not any([row._has_names() for row in rows]):
                self._leaf(Leaf.SIZE, [row.batch_size for row in rows])
                names = tuple(sorted(keys))
                children = tuple([self._visit_column([entry[name] for entry in entries]) for name in names])
                return LazyBranch(names, children, self.device or first.device)
        elif kind is NonTensorData:
            return self._leaf(Leaf.DATA, [_data_of(row) for row in rows])
        elif is_tensorclass(first):
            parts = [row.__dict__ for row in rows]  # attribute access would take as long as the rest of this walk
            fields = dict(parts[0]["_non_tensordict"])
            if all([part["_non_tensordict"] == fields for part in parts]):
                return Wrapped(kind, self.visit_rows([part["_tensordict"] for part in parts]), fields)
        elif hasattr(kind, "from_messages"):
            self._leaf(Leaf.DATA, [list(row.messages) for row in rows])
            return Messages(kind)
        return self._leaf(Leaf.ROW, list(rows))

    def _visit_column(self, values: list[Any]) -> Any:
        if isinstance(values[0], Tensor) and all([isinstance(value, Tensor) for value in values]):
            return self._leaf(Leaf.RAGGED, values)
        return self.visit_rows(values)

    def _visit_entry(self, values: Any) -> Any:
        if type(values) is not list:
            return self.visit(values)
        tensors = all([isinstance(value, Tensor) for value in values])
        return self._leaf(Leaf.RAGGED if tensors else Leaf.DATA, values)

    def _leaf(self, kind: Any, column: Any) -> Any:
        self.columns.append(column)
        self.kinds.append(kind)
        return kind


def _data_of(value: NonTensorData) -> Any:
    return value.__dict__["_non_tensordict"]["data"]


# --- copies --------------------------------------------------------------------------------------------------------


def copy_columns(
    layout: Layout,
    columns: Sequence[Any],
    device: torch.device | None = None,
    forms: Sequence[Any] | None = None,
    *,
    borrow: bool = False,
) -> list[Any]:
    """Columns that share no memory with the given ones: one kernel per column if the rows allow it.

    Python values are kept by reference (they may not be copyable). A tensor column may be given as one tensor or as a
    list of rows (tensors or, if a row is one number, numbers) and is returned as one tensor. ``forms`` is the result
    of ``ragged_forms``, if known. ``borrow`` returns ragged columns as `LazyCopy`: ``put_together`` copies their
    rows, except in `Columns` batches, which copy on first read.
    """
    copies: list[Any] = []
    forms = ragged_forms(layout, columns) if forms is None else forms
    for kind, column, form in zip(layout.kinds, columns, forms, strict=True):
        if type(kind) is TensorLeaf:
            copy = _copy_dense(kind, column)
            copies.append(copy if device is None else copy.to(device))
        elif kind is Leaf.RAGGED:
            copies.append(LazyCopy(column, form) if borrow else copy_rows(column, form, device))
        elif kind is Leaf.ROW:
            copies.append([row.clone() if device is None else row.clone().to(device) for row in column])
        else:
            copies.append(column)
    return copies


def _copy_dense(kind: TensorLeaf, column: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column.clone()
    if isinstance(column[0], Tensor):
        return torch.stack(column)
    return torch.from_numpy(np.array(column, dtype=NUMBERS[kind.dtype]).reshape(-1, *kind.shape))


def ragged_forms(layout: Layout, columns: Sequence[Any]) -> tuple[Any, ...]:
    """The ``rows_form`` of every ragged column; None for other columns."""
    kinds = zip(layout.kinds, columns, strict=True)
    return tuple([rows_form(column) if kind is Leaf.RAGGED else None for kind, column in kinds])


def copy_like(node: Any, value: Any, copies: list[Any]) -> bool:
    """Appends copies of the entries of a single row whose tree is known, in a third of the time of a general copy.

    Returns False if the row has another tree or an entry that needs another kind of copy; ``to_rows`` handles it.
    """
    kind = type(node)
    if kind is LazyBranch:
        if type(value) is not TensorDict or value._td_dim_names is not None or value._device != node.device:
            return False
        entries = value._tensordict
        if len(entries) != len(node.names):
            return False
        copies.append(value._batch_size)
        for name, child in zip(node.names, node.children, strict=True):
            entry = entries.get(name)
            if child is Leaf.RAGGED:
                if type(entry) is not Tensor or entry.layout is not torch.strided:
                    return False
                copies.append(entry.clone())
            elif not copy_like(child, entry, copies):
                return False
        return True
    if kind is Wrapped:
        if type(value) is not node.cls or value.__dict__["_non_tensordict"] != node.fields:
            return False
        return copy_like(node.inner, value.__dict__["_tensordict"], copies)
    if kind is Messages and type(value) is node.cls:
        copies.append(list(value.messages))
        return True
    if node is Leaf.DATA and type(value) is NonTensorData:
        copies.append(_data_of(value))
        return True
    return False


# --- together ------------------------------------------------------------------------------------------------------


def put_together(layout: Layout, columns: Sequence[Any], num_rows: int) -> Any:
    """The batch of ``num_rows`` rows with this layout whose entries *are* the given columns, not copies."""
    return _batch(layout.root, iter(columns), num_rows)


def put_rows_together(layout: Layout, columns: Sequence[Any], num_rows: int) -> list[Any]:
    """The rows of `put_together` as a list of single rows."""
    return list(_rows(layout.root, iter(columns), num_rows))


def _batch(node: Any, columns: Iterator[Any], num_rows: int) -> Any:
    kind = type(node)
    if kind is TensorLeaf:
        return next(columns)
    if kind is Branch:
        entries = {}
        for name, child in zip(node.names, node.children, strict=True):
            entries[name] = next(columns) if type(child) is TensorLeaf else _batch(child, columns, num_rows)
        return bare_tensordict(entries, torch.Size((num_rows, *node.batch_size)), node.device)
    if kind is Wrapped:
        return _wrap(node.cls, _batch(node.inner, columns, num_rows), dict(node.fields))
    if kind is Tree:
        return pytree.tree_unflatten([_batch(child, columns, num_rows) for child in node.children], node.spec)
    if kind is Columns:
        entries = {
            name: _held(next(columns))
            if isinstance(child, Leaf) and child is not Leaf.ROW
            else _batch(child, columns, num_rows)
            for name, child in zip(node.names, node.children, strict=True)
        }
        return node.cls.from_columns(entries, num_rows)
    if node is Leaf.DATA:
        return NonTensorStack._new_lazy_unsafe(*[non_tensor(value) for value in next(columns)])
    if kind is Messages:
        chats = next(columns)
        lengths = {len(chat) for chat in chats}
        size = torch.Size([num_rows, lengths.pop() if len(lengths) == 1 else -1])
        return LazyRows.over(partial(_conversations, node.cls, chats), size)
    rows = list(_rows(node, columns, num_rows))
    if kind is LazyBranch or not (is_tensorclass(rows[0]) or is_non_tensor(rows[0])):
        return LazyStackedTensorDict._new_lazy_unsafe(*rows)
    return LazyStackedTensorDict.lazy_stack(rows)


def _rows(node: Any, columns: Iterator[Any], num_rows: int) -> Sequence[Any]:
    kind = type(node)
    if kind is TensorLeaf:
        return next(columns).unbind(0)
    if kind is Branch or kind is LazyBranch or kind is Columns:
        names, device = node.names, None if kind is Columns else node.device
        sizes = next(columns) if kind is LazyBranch else [node.batch_size if kind is Branch else _EMPTY] * num_rows
        by_name = [_rows(child, columns, num_rows) for child in node.children]
        return [
            bare_tensordict(dict(zip(names, values, strict=True)), size, device)
            for size, *values in zip(sizes, *by_name, strict=True)
        ]
    if kind is Wrapped:
        return [_wrap(node.cls, row, dict(node.fields)) for row in _rows(node.inner, columns, num_rows)]
    if kind is Tree:
        by_leaf = [_rows(child, columns, num_rows) for child in node.children]
        return [pytree.tree_unflatten(list(leaves), node.spec) for leaves in zip(*by_leaf, strict=True)]
    values = next(columns)
    if kind is Messages:
        return _conversations(node.cls, values)
    if node is Leaf.DATA:
        return [non_tensor(value) for value in values]
    return values.copies() if type(values) is LazyCopy else values


def _conversations(cls: type, chats: Sequence[list[Any]]) -> list[Any]:
    return [cls.from_messages(list(messages)) for messages in chats]


def _held(values: Any) -> Any:
    return values if type(values) is LazyCopy else list(values)


def _wrap(cls: type, inner: Any, fields: dict[str, Any]) -> Any:
    """A tensorclass around a tensordict that was taken out of one, so its keys need no check."""
    out = cls.__new__(cls)
    out.__dict__["_tensordict"] = inner
    out.__dict__["_non_tensordict"] = fields
    if hasattr(cls, "__post_init__"):  # __new__ alone does not run it
        out.__post_init__()
    return out


def ragged_column(root: Any, path: Sequence[str]) -> int | None:
    """The index of the column that holds the ragged entry at ``path``; None if there is no such entry."""
    return _find_ragged(root, list(path), count())


def _find_ragged(node: Any, path: list[str], numbers: Iterator[int]) -> int | None:
    if type(node) is Wrapped:
        return _find_ragged(node.inner, path, numbers)
    if type(node) in (Branch, LazyBranch, Columns):
        if type(node) is LazyBranch:
            next(numbers)  # the column of batch sizes
        for name, child in zip(node.names, node.children, strict=True):
            # Other children are visited too, to count their columns; the path [""] matches none of them.
            found = _find_ragged(child, path[1:] if path[:1] == [name] else [""], numbers)
            if found is not None:
                return found
        return None
    number = next(numbers)
    return number if node is Leaf.RAGGED and not path else None
