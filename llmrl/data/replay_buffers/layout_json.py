"""A `Layout` (the tree of a batch, without its entries) and trees of Python containers as JSON, and back.

Tensors of a checkpoint are read into the memory of the CPU, so of a device only whether there was one is kept. Classes
are named by module and name and looked up when they are read: in llmrl, tensordict, and what is imported already.
"""

from __future__ import annotations

import base64
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from tensordict import is_tensorclass
from torch.utils import _pytree as pytree

from llmrl.data.replay_buffers.directory import object_bytes, object_from
from llmrl.data.replay_buffers.layout import (
    Branch,
    Columns,
    Layout,
    LazyBranch,
    Leaf,
    Messages,
    TensorLeaf,
    Tree,
    Wrapped,
)
from llmrl.data.replay_buffers.pytree import is_leaf, is_tree
from llmrl.errors import CheckpointError

__all__ = [
    "class_name",
    "exact_json",
    "find_class",
    "is_container",
    "layout_from_json",
    "layout_to_json",
    "tree_from_json",
    "tree_to_json",
]

_PACKAGES = ("llmrl", "tensordict")  # their modules may be imported for a name in a file
_MOVED = {  # modules of classes of rows, by where they were when earlier dumps were written
    "llmrl.data.llm.message_stack": "llmrl.data.ragged.messages",
    "llmrl.modules.llm.policies.ragged": "llmrl.data.ragged.stack",
}
_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (*_MAPPINGS, *_SEQUENCES)}


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
    if isinstance(node, Tree):
        marks: list[Any] = []  # 0 for a child; None is a field of a dataclass without one
        shape = tree_to_json(pytree.tree_unflatten([0] * len(node.children), node.spec), marks, is_tree)
        return {"tree": shape, "marks": marks, "children": [_to_json(child) for child in node.children]}
    assert isinstance(node, Wrapped), node
    return {"inner": _to_json(node.inner), "class": class_name(node.cls), "fields": _fields_to_json(node)}


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
        return Columns(
            find_class(node["class"], lambda cls: hasattr(cls, "from_columns")),
            *_read_children(node["columns"], kinds),
        )
    if "messages" in node:
        kinds.append(Leaf.DATA)
        return Messages(find_class(node["messages"], lambda cls: hasattr(cls, "from_messages")))
    if "tree" in node:
        spec = pytree.tree_structure(tree_from_json(node["tree"], iter(node["marks"])), is_leaf=is_leaf)
        return Tree(spec, tuple([_from_json(child, kinds) for child in node["children"]]))
    cls = find_class(node["class"], is_tensorclass)
    return Wrapped(cls, _from_json(node["inner"], kinds), _fields_from_json(node["fields"]))


def _children(node: Branch | LazyBranch | Columns) -> list[Any]:
    return [[name, _to_json(child)] for name, child in zip(node.names, node.children, strict=True)]


def _read_children(children: Iterable[Any], kinds: list[Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    read = [(name, _from_json(child, kinds)) for name, child in children]
    return tuple([name for name, _ in read]), tuple([child for _, child in read])


def _device(node: dict[str, Any]) -> torch.device | None:
    return torch.device("cpu") if node["device"] else None


def _fields_to_json(node: Wrapped) -> dict[str, Any]:
    leaves: list[Any] = []
    shape = tree_to_json(node.fields, leaves)
    if exact_json(leaves):
        return {"shape": shape, "leaves": leaves}
    return {"shape": shape, "object": base64.b64encode(object_bytes(leaves, f"a {node.cls.__name__} of rows")).decode()}


def _fields_from_json(node: dict[str, Any]) -> dict[str, Any]:
    leaves = node.get("leaves")
    if leaves is None:
        leaves = object_from(base64.b64decode(node["object"]), "a field of rows in a dump")
    return tree_from_json(node["shape"], iter(leaves))


def is_container(value: Any) -> bool:
    """True for a container or record that holds more than JSON does, and can be told from others by its entries."""
    if type(value) in (*_MAPPINGS, *_SEQUENCES):
        return not exact_json(value) and (type(value) not in _MAPPINGS or exact_json(list(value)))
    return _is_record(value)


def tree_to_json(value: Any, leaves: list[Any], is_tree: Callable[[Any], bool] = is_container) -> Any:
    """The shape of nested dicts, lists, tuples, sets and records as JSON; the rest are leaves."""
    if not is_tree(value):
        leaves.append(value)
        return None
    kind = type(value)
    if kind in _MAPPINGS and exact_json(list(value)):
        return {kind.__name__: [[name, tree_to_json(entry, leaves, is_tree)] for name, entry in value.items()]}
    if kind in _SEQUENCES:
        return {kind.__name__: [tree_to_json(entry, leaves, is_tree) for entry in value]}
    if not _is_record(value):
        raise CheckpointError(
            "rows in files must be made of dicts (of text or numbers), lists, tuples, named tuples and dataclasses: "
            f"got {kind.__module__}.{kind.__qualname__}; make it one of these."
        )
    entries = value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]
    return {"class": class_name(kind), "entries": [tree_to_json(entry, leaves, is_tree) for entry in entries]}


def tree_from_json(shape: Any, leaves: Iterator[Any]) -> Any:
    """The tree again. Records are filled without their constructors, which a file is not to call."""
    if shape is None:
        return next(leaves)
    if "class" in shape:
        cls = find_class(shape["class"], _is_record_class)
        entries = [tree_from_json(entry, leaves) for entry in shape["entries"]]
        if issubclass(cls, tuple):
            return tuple.__new__(cls, entries)
        out = object.__new__(cls)
        for field, entry in zip(fields(cls), entries, strict=True):
            object.__setattr__(out, field.name, entry)
        return out
    ((name, entries),) = shape.items()
    cls = _CONTAINERS[name]
    if cls in _MAPPINGS:
        return cls([(key, tree_from_json(entry, leaves)) for key, entry in entries])
    return cls([tree_from_json(entry, leaves) for entry in entries])


def _is_record(value: Any) -> bool:
    """True for a named tuple or dataclass whose fields are all there is to it."""
    if not _is_record_class(type(value)):
        return False
    names = set() if isinstance(value, tuple) else {field.name for field in fields(value)}
    return getattr(value, "__dict__", {}).keys() <= names and all(hasattr(value, name) for name in names)


def _is_record_class(cls: type) -> bool:
    if issubclass(cls, tuple):
        return bool(getattr(cls, "_fields", ()))
    return is_dataclass(cls) and not is_tensorclass(cls) and cls.__new__ is object.__new__


def class_name(cls: type) -> str:
    """Module and name. Raises  CheckpointError if the class cannot be found by them"""
    name = f"{cls.__module__}:{cls.__qualname__}"
    find_class(name, lambda found: found is cls)
    return name


def find_class(name: str, fits: Callable[[type], bool]) -> type:
    """The class of that ``class_name``. Imports none but our own modules, and runs nothing to look it up.

    Raises  CheckpointError if it is not there, or is none that ``fits``
    """
    module, _, path = name.partition(":")
    module = _MOVED.get(module, module)
    try:
        if module.partition(".")[0] in _PACKAGES:
            importlib.import_module(module)
        found: Any = sys.modules[module]
        for part in path.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the class {name} of rows in a dump cannot be found ({error!r}); define it at the top of a module, and "
            "import that before loading."
        ) from error
    if not (isinstance(found, type) and fits(found)):
        raise CheckpointError(f"a dump must name a class of rows where it has {name}; load another one.")
    return found
