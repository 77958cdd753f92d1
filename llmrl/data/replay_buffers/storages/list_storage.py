"""A list of arbitrary Python objects: the storage that accepts anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.replay_buffers.storages.base import Storage, positions, row_limit


class ListStorage(Storage):
    """Python objects in a list, up to ``max_size`` of them (default: no limit).

    Tensors and tensordicts are copied on the way in and out, also inside dicts, lists and tuples, and are moved to
    ``device`` if one is given. Any other object is kept by reference.

    >>> storage = ListStorage(3)
    >>> storage.set(0, "a string")
    >>> storage.set(slice(1, 3), [30, None])
    >>> storage.get(slice(0, 3))
    ['a string', 30, None]
    """

    def __init__(self, max_size: int | None = None, *, device: torch.device | str | None = None) -> None:
        self.max_size = row_limit("ListStorage", max_size)
        self.device = None if device is None else torch.device(device)
        self._rows: list[Any] = []

    def __len__(self) -> int:
        return len(self._rows)

    def empty(self) -> None:
        self._rows = []

    def count(self, data: Any) -> int:
        return leading_size(data)

    def part(self, data: Any, start: int, end: int) -> Any:
        return _split(data)[start:end]

    def set(self, index: int | slice | Tensor, data: Any) -> None:
        if isinstance(index, int):
            self._put([index], [_copy(data, self.device)])
        else:
            rows = [_copy(row, self.device) for row in _split(data)]
            self._put(positions(index, self.max_size), rows)

    def get(self, index: int | slice | Tensor) -> Any:
        if isinstance(index, int):
            return _copy(self._rows[index])
        return [_copy(self._rows[position]) for position in positions(index, len(self))]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [_copy(row) for row in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_fits(len(state["rows"]) - 1)
        self._rows = [_copy(row, self.device) for row in state["rows"]]

    def _put(self, where: list[int], rows: list[Any]) -> None:
        self._check_run(where, len(rows))
        for position, row in zip(where, rows, strict=True):
            if position < len(self._rows):
                self._rows[position] = row
            else:
                self._rows.append(row)


def _copy(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, dict | list | tuple):
        return pytree.tree_map(lambda leaf: _copy(leaf, device), value, is_leaf=_is_leaf)
    if isinstance(value, Tensor) or is_tensor_collection(value):
        value = value.detach().clone()
    elif device is None or not hasattr(value, "to"):
        return value
    return value if device is None else value.to(device)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple)


def leading_size(data: Any) -> int:
    """How many rows a batch holds: the leading size, which all entries share."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        if not data.shape:
            raise RuntimeError("extend: a batch has a leading dimension that counts rows: got a scalar; use add.")
        return data.shape[0]
    if isinstance(data, dict | tuple):
        sizes = {leading_size(leaf) for leaf in pytree.tree_leaves(data, is_leaf=_is_leaf)}
        if len(sizes) != 1:
            raise RuntimeError(
                f"extend: all entries of a {type(data).__name__} must have one leading size: got {sorted(sizes)}."
            )
        return sizes.pop()
    if isinstance(data, Iterable) and hasattr(data, "__len__"):
        return len(data)
    raise RuntimeError(f"extend: a batch is a tensor, tensordict, list, dict or tuple: got {type(data).__name__}.")


def _split(data: Any) -> list[Any]:
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return list(data.unbind(0))
    if isinstance(data, dict | tuple):
        leaves, spec = pytree.tree_flatten(data, is_leaf=_is_leaf)
        columns = [list(leaf) if isinstance(leaf, list) else list(leaf.unbind(0)) for leaf in leaves]
        return [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]
    return list(data)
