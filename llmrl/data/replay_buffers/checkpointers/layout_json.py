"""A `Layout` (the tree of a batch, without its entries) as JSON, and back.

Tensors of a checkpoint are read into the memory of the CPU, so of a device only whether there was one is kept. Classes
are named by module and name and looked up when they are read.
"""

from __future__ import annotations

import base64
import importlib
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import is_tensorclass

from llmrl.data.replay_buffers.layout import (
    Branch,
    Columns,
    Layout,
    LazyBranch,
    Leaf,
    Messages,
    TensorLeaf,
    Wrapped,
)
from llmrl.errors import CheckpointError

__all__ = ["class_name", "exact_json", "find_class", "layout_from_json", "layout_to_json"]


def layout_to_json(layout: Layout) -> Any:
    return _to_json(layout.root)


def layout_from_json(node: Any) -> Layout:
    kinds: list[Any] = []
    return Layout(_from_json(node, kinds), tuple(kinds))


def exact_json(value: Any) -> bool:
    """True if JSON gives back exactly this value: same types, all the way down."""
    kind = type(value)
    if kind is list:
        return all([exact_json(entry) for entry in value])
    if kind is dict:
        return all([type(name) is str and exact_json(entry) for name, entry in value.items()])
    return value is None or kind in (str, int, float, bool)


def _to_json(node: Any) -> Any:
    if isinstance(node, Leaf):
        return node.value
    if isinstance(node, TensorLeaf):
        return {"shape": list(node.shape), "dtype": str(node.dtype).removeprefix("torch.")}
    if isinstance(node, Branch):
        return {"dense": _children(node), "batch_size": list(node.batch_size), "device": node.device is not None}
    if isinstance(node, LazyBranch):
        return {"lazy": _children(node), "device": node.device is not None}
    if isinstance(node, Columns):
        return {"columns": _children(node), "class": class_name(node.cls)}
    if isinstance(node, Messages):
        return {"messages": class_name(node.cls)}
    assert isinstance(node, Wrapped), node  # dicts and tuples do not lie inside of tensordicts
    return {"inner": _to_json(node.inner), "class": class_name(node.cls), "fields": _value_to_json(node.fields)}


def _from_json(node: Any, kinds: list[Any]) -> Any:
    if isinstance(node, str):
        kinds.append(Leaf(node))
        return kinds[-1]
    if "dtype" in node:
        kinds.append(TensorLeaf(torch.Size(node["shape"]), getattr(torch, node["dtype"])))
        return kinds[-1]
    if "lazy" in node:
        kinds.append(Leaf.SIZE)
        return LazyBranch(*_read_children(node["lazy"], kinds), _device(node))
    if "dense" in node:
        return Branch(*_read_children(node["dense"], kinds), torch.Size(node["batch_size"]), _device(node))
    if "columns" in node:
        return Columns(find_class(node["class"]), *_read_children(node["columns"], kinds))
    if "messages" in node:
        kinds.append(Leaf.DATA)
        return Messages(find_class(node["messages"]))
    return Wrapped(find_class(node["class"]), _from_json(node["inner"], kinds), _value_from_json(node["fields"]))


def _children(node: Branch | LazyBranch | Columns) -> list[Any]:
    return [[name, _to_json(child)] for name, child in zip(node.names, node.children, strict=True)]


def _read_children(children: Iterable[Any], kinds: list[Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    read = [(name, _from_json(child, kinds)) for name, child in children]
    return tuple([name for name, _ in read]), tuple([child for _, child in read])


def _device(node: dict[str, Any]) -> torch.device | None:
    return torch.device("cpu") if node["device"] else None


def _value_to_json(value: Any) -> dict[str, Any]:
    return {"value": value} if exact_json(value) else {"pickle": base64.b64encode(pickle.dumps(value)).decode()}


def _value_from_json(node: dict[str, Any]) -> Any:
    return node["value"] if "value" in node else pickle.loads(base64.b64decode(node["pickle"]))


def class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def find_class(name: str) -> type:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint holds rows of the class {name}, which cannot be imported ({error}); make it importable "
            "under this name before loading."
        ) from error
    if not (is_tensorclass(found) or hasattr(found, "from_columns") or hasattr(found, "from_messages")):
        raise CheckpointError(f"the checkpoint names {name} as a class of rows, which it is not.")
    return found
