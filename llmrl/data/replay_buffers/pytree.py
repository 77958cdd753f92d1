"""Rows that are trees: dicts, tuples, lists and dataclasses of tensors, tensordicts and Python values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree


def is_tree(value: Any) -> bool:
    """True for a container whose entries are rows, or columns of them; dataclasses count."""
    if isinstance(value, dict | tuple | list):
        return True
    if isinstance(value, type) or not is_dataclass(value) or is_tensor_collection(value):
        return False
    _know_class(type(value))
    return True


def know_classes(spec: pytree.TreeSpec) -> None:
    """Lets trees of this form be built in a process that has met none of their dataclasses."""
    if is_dataclass(spec.type):
        _know_class(spec.type)
    for child in spec.children():
        know_classes(child)


def _know_class(cls: type) -> None:
    if cls not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(cls)


def is_leaf(value: Any) -> bool:
    return not is_tree(value)


def tree_leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=is_leaf)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map(function, value, is_leaf=is_leaf)


def num_rows(data: Any) -> int:
    """How many rows a batch holds: the leading size, which all entries share; a list holds rows one by one."""
    if isinstance(data, list):
        return len(data)
    if isinstance(data, Tensor) or is_tensor_collection(data):
        shape = data.shape
        if not shape:
            raise RuntimeError("extend: a batch has a leading dimension that counts rows: got a scalar; use add.")
        return shape[0]
    if is_tree(data):
        sizes = {num_rows(leaf) for leaf in tree_leaves(data)}
        if len(sizes) != 1:
            raise RuntimeError(
                f"extend: all entries of a {type(data).__name__} must have one leading size: got {sorted(sizes)}."
            )
        return sizes.pop()
    if isinstance(data, Iterable) and hasattr(data, "__len__"):
        return len(data)
    raise RuntimeError(f"extend: a batch is a tensor, tensordict, list, dict or tuple: got {type(data).__name__}.")


def part(data: Any, start: int, end: int) -> Any:
    """The rows ``start .. end - 1`` of a batch."""
    if isinstance(data, list) or is_leaf(data):
        return data[start:end]
    return tree_map(lambda leaf: leaf[start:end], data)


def split(data: Any) -> list[Any]:
    """The single rows of a batch."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return list(data.unbind(0))
    if isinstance(data, list) or not is_tree(data):
        return list(data)
    leaves, spec = pytree.tree_flatten(data, is_leaf=is_leaf)
    rows = zip(*[split(leaf) for leaf in leaves], strict=True)
    return [pytree.tree_unflatten(list(row), spec) for row in rows]
