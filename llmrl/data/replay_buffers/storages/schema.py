"""The fixed schema of a tensor storage: does a batch have it, and which column holds which key?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.replay_buffers.layout import Branch, Layout, TensorLeaf, Tree, Wrapped
from llmrl.data.replay_buffers.storages.base import Key, missing_entry


class Schema:
    """A layout of rows, with the answers to two questions that every write and every sampler asks prepared."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._single = [getattr(kind, "shape", None) for kind in layout.kinds]
        self._num_rows, self._batched = -1, []
        self._column_of: dict[tuple[str, ...], int] = {}
        numbers = _numbered(layout.root, count())
        self.names = frozenset(numbers if isinstance(numbers, dict) else ())  # of the outermost entries

    def match(self, data: Any, num_rows: int | None) -> list[Tensor] | None:
        """The columns of a plain tensordict or tensor that has this schema and ``num_rows`` rows (None: is one row).

        None says that a closer look is needed, not that something is wrong.
        """
        expected = self._single
        if num_rows is not None:
            if num_rows != self._num_rows:
                self._batched = [shape if shape is None else torch.Size((num_rows, *shape)) for shape in self._single]
                self._num_rows = num_rows
            expected = self._batched
        columns: list[Tensor] = []
        return columns if _collect(self.layout.root, data, expected, columns) else None

    def column(self, who: str, key: Key) -> int:
        """The number of the column that holds an entry."""
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in self._column_of:
            self._column_of[path] = self._find(who, path)
        return self._column_of[path]

    def _find(self, who: str, path: tuple[str, ...]) -> int:
        numbers = _numbered(self.layout.root, count())
        for depth, name in enumerate(path):
            known = list(numbers) if isinstance(numbers, dict) else []
            if name not in known:
                raise missing_entry(who, path, path[:depth], known)
            numbers = numbers[name]
        if not isinstance(numbers, int):
            raise missing_entry(who, (*path, "..."), path, list(numbers))
        return numbers


def _collect(node: Any, value: Any, expected: list[Any], columns: list[Tensor]) -> bool:
    if type(node) is TensorLeaf:
        if not isinstance(value, Tensor) or value.dtype is not node.dtype or value.shape != expected[len(columns)]:
            return False
        columns.append(value)
        return True
    if type(node) is not Branch or type(value) is not TensorDict:
        return False
    entries = value._tensordict
    if len(entries) != len(node.names):
        return False
    for name, child in zip(node.names, node.children, strict=True):
        if not _collect(child, entries.get(name), expected, columns):
            return False
    return True


def _numbered(node: Any, numbers: Iterator[int]) -> Any:
    """The tree as nested dicts whose leaves are numbers of columns."""
    if type(node) is Wrapped:
        return _numbered(node.inner, numbers)
    if type(node) is Branch:
        return {name: _numbered(child, numbers) for name, child in zip(node.names, node.children, strict=True)}
    if type(node) is Tree:
        return pytree.tree_unflatten([_numbered(child, numbers) for child in node.children], node.spec)
    return next(numbers)
