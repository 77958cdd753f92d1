"""The fixed schema of a tensor storage: matches batches against it and finds the column of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.ragged.layout import Branch, Layout, Leaf, Messages, TensorLeaf, Tree, Wrapped
from llmrl.data.ragged.tensordicts import entries_of
from llmrl.data.replay_buffers.storages.base import Key, missing_entry


class Schema:
    """A layout of rows with cached lookups for the checks on every write and the reads of every sampler."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._single = [getattr(kind, "shape", None) for kind in layout.kinds]
        self._num_rows, self._batched = -1, []
        self._column_of: dict[tuple[str, ...], int] = {}
        self._numbers = _numbered(layout.root, count())
        self.names = frozenset(self._numbers if isinstance(self._numbers, dict) else ())  # of the outermost entries

    def match(self, data: Any, num_rows: int | None) -> list[Tensor] | None:
        """The columns of a plain tensordict or tensor that has this schema and ``num_rows`` rows (None: is one row).

        Returns None if this fast path does not apply; the data may still be valid, which the slow path decides.
        """
        expected = self._single
        if num_rows is not None:
            if num_rows != self._num_rows:  # most batches have the same size, so the last shapes are cached
                self._batched = [shape if shape is None else torch.Size((num_rows, *shape)) for shape in self._single]
                self._num_rows = num_rows
            expected = self._batched
        columns: list[Tensor] = []
        return columns if _collect(("",), (self.layout.root,), {"": data}, expected, columns) else None

    def column(self, who: str, key: Key) -> int:
        """The index of the column that holds an entry."""
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in self._column_of:
            numbers = self._numbers
            for depth, name in enumerate(path):
                known = list(numbers) if isinstance(numbers, dict) else []
                if name not in known:
                    raise missing_entry(who, path, path[:depth], known)
                numbers = numbers[name]
            if not isinstance(numbers, int):
                raise missing_entry(who, (*path, "..."), path, list(numbers))
            self._column_of[path] = numbers
        return self._column_of[path]


def _collect(names: Sequence[str], nodes: Sequence[Any], entries: Any, expected: list[Any], columns: list[Any]) -> bool:
    """Appends the leaves of these entries to ``columns``; False if an entry is missing or not as expected."""
    if len(entries) != len(names):
        return False
    for name, node in zip(names, nodes, strict=True):
        value = entries.get(name)
        if type(node) is TensorLeaf:
            if not isinstance(value, Tensor) or value.dtype is not node.dtype or value.shape != expected[len(columns)]:
                return False
            columns.append(value)
        else:
            inner = type(node) is Branch and type(value) is TensorDict and entries_of(value)
            if inner is False or not _collect(node.names, node.children, inner, expected, columns):
                return False
    return True


def _numbered(node: Any, numbers: Iterator[int]) -> Any:
    """The tree as nested dicts whose leaves are column indices."""
    if type(node) is Wrapped:
        return _numbered(node.inner, numbers)
    if type(node) is Branch:
        return {name: _numbered(child, numbers) for name, child in zip(node.names, node.children, strict=True)}
    if type(node) is Tree:
        return pytree.tree_unflatten([_numbered(child, numbers) for child in node.children], node.spec)
    return next(numbers)


def difference(expected: Any, got: Any, path: tuple[str, ...] = ()) -> str:
    """Describes the first difference between the trees of two layouts, with its key."""
    where = repr(path[0] if len(path) == 1 else path) if path else "the row"
    if type(expected) is Wrapped and type(got) is Wrapped and expected.cls is got.cls:
        return difference(expected.inner, got.inner, path)
    if type(expected) is not Branch or type(got) is not Branch:
        return f"{where}: got {_describe(got)}, expected {_describe(expected)}"
    for what, names, others in (("unknown", got.names, expected.names), ("missing", expected.names, got.names)):
        for name in names:
            if name not in others:
                return f"{what} key {(*path, name) if path else name!r}"
    for name, child in zip(expected.names, expected.children, strict=True):
        other = got.children[got.names.index(name)]
        if child != other:
            return difference(child, other, (*path, name))
    return (
        f"{where}: got batch size {list(got.batch_size)} after the row dimension and device {got.device}, expected "
        f"{list(expected.batch_size)} and {expected.device}"
    )


def _describe(node: Any) -> str:
    if type(node) is TensorLeaf:
        return f"{str(node.dtype).removeprefix('torch.')}{list(node.shape)} per row"
    if type(node) is Tree:
        return f"a {node.spec.type.__name__ if node.spec.type else 'tree'} of {len(node.children)} entries"
    if type(node) is Wrapped:
        return node.cls.__name__
    if isinstance(node, Leaf):
        return {Leaf.DATA: "a Python value", Leaf.RAGGED: "a ragged entry"}.get(node, "a tensordict")
    return {Messages: "a conversation", Branch: "a tensordict"}.get(type(node), "a lazy stack")
