"""The content of a storage as a tree in JSON and tensors in a container, and back.

Content is whatever rows are: tensors, tensordicts, tensorclasses, lazy stacks, dicts and tuples of these, or a list of
any values. Python values are written as JSON where that gives them back exactly, and by ``torch.save`` where that gives
them back without running code; others are refused. The tree (one node per tensordict, one reference per tensor) goes to
the manifest; where tensors lie is the container's business.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.checkpointers.containers import Container
from llmrl.data.replay_buffers.directory import object_bytes, object_from
from llmrl.data.replay_buffers.layout import (
    Leaf,
    TensorLeaf,
    put_rows_together,
    put_together,
    take_apart,
    take_rows_apart,
)
from llmrl.data.replay_buffers.layout_json import (
    class_name,
    exact_json,
    find_class,
    is_container,
    layout_from_json,
    layout_to_json,
    tree_from_json,
    tree_to_json,
)
from llmrl.errors import CheckpointError

__all__ = ["read_content", "write_content"]

Node = dict[str, Any]
Path = tuple[str, ...]

_INLINE = 2048  # values of so many bytes go to the manifest, larger ones to a file


# --- out ---


def write_content(value: Any, out: Container, path: Path = ()) -> Node:
    """Puts the tensors of ``value`` into the container; returns the rest, as JSON."""
    if isinstance(value, Tensor):
        return _write_tensor(value, out, path)
    if type(value) is NonTensorData:
        size = list(value.batch_size)
        return {"kind": "data", "batch_size": size, "value": _write_values([value.data], out, path)}
    if type(value) is TensorDict:
        return {
            "kind": "tensordict",
            "entries": [[name, write_content(entry, out, (*path, name))] for name, entry in sorted(value.items())],
            "batch_size": list(value.batch_size),
            "names": list(value.names) if value._has_names() else None,
            "device": value.device is not None,
        }
    if is_tensor_collection(value) and value.batch_dims:
        layout, columns = take_apart(value)
        nodes = [
            _write_column(kind, column, out, (*path, str(number)))
            for number, (kind, column) in enumerate(zip(layout.kinds, columns, strict=True))
        ]
        return {"kind": "batch", "layout": layout_to_json(layout), "columns": nodes, "rows": len(value)}
    if type(value) is list:
        return _write_rows(value, out, path)
    if is_container(value):
        leaves: list[Any] = []
        shape = tree_to_json(value, leaves)
        nodes = [write_content(leaf, out, (*path, str(number))) for number, leaf in enumerate(leaves)]
        return {"kind": "tree", "shape": shape, "leaves": nodes}
    return {"kind": "value", "value": _write_values([value], out, path)}


def _write_tensor(value: Tensor, out: Container, path: Path) -> Node:
    if value.is_nested and value.layout is torch.jagged:
        lengths = value.offsets().diff()
        return {
            "kind": "jagged",
            "values": out.put(path, value.values()),
            "lengths": out.put((*path, "lengths"), lengths),
        }
    if value.is_nested or value.layout is not torch.strided:
        return {"kind": "value", "value": _write_values([value], out, path)}
    return {"kind": "tensor", "tensor": out.put(path, value)}


def _write_column(kind: Any, column: Any, out: Container, path: Path) -> Node:
    if isinstance(column, Tensor):
        return _write_tensor(column, out, path)
    if type(kind) is TensorLeaf:
        return _write_tensor(torch.stack(column), out, path)
    if kind is Leaf.RAGGED:
        return _write_ragged(column, out, path)
    if kind is Leaf.ROW:
        return _write_rows(column, out, path)
    if kind is Leaf.SIZE:
        column = [list(size) for size in column]
    return {"kind": "values", **_write_values(column, out, path)}


def _write_ragged(column: Sequence[Tensor], out: Container, path: Path) -> Node:
    """Tensors of different sizes, one after the other in one file."""
    kinds = {(value.dtype, value.ndim, value.layout, value.is_nested) for value in column}
    if len(kinds) > 1 or any(layout is not torch.strided or nested for _, _, layout, nested in kinds):
        return {"kind": "values", **_write_values(list(column), out, path)}
    if len({value.shape for value in column}) == 1:
        return {"kind": "stacked", "tensor": out.put(path, torch.stack(list(column)))}
    sizes = torch.tensor([list(value.shape) for value in column], dtype=torch.int64)
    flat = torch.cat([value.reshape(-1) for value in column])
    return {"kind": "ragged", "tensor": out.put(path, flat), "sizes": out.put((*path, "sizes"), sizes)}


def _write_values(values: list[Any], out: Container, path: Path) -> Node:
    try:
        return _write_plain(values, out, path)
    except CheckpointError:  # what none of them takes as a whole, its parts may
        return {"as": "rows", "rows": _write_rows(values, out, path)}


def _write_plain(values: list[Any], out: Container, path: Path) -> Node:
    exact = exact_json(values)
    data = json.dumps(values).encode() if exact else object_bytes(values, f"the entry {'.'.join(path)!r} of the rows")
    if exact and len(data) <= _INLINE:
        return {"as": "inline", "values": values}
    return {"as": "json" if exact else "object", "data": out.put(path, _tensor_of(data), ".json" if exact else ".pt")}


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _write_rows(rows: list[Any], out: Container, path: Path) -> Node:
    """A list of any values: those of one form together, one column per entry."""
    groups: dict[str, tuple[list[int], list[list[Any]]]] = {}
    for number, row in enumerate(rows):
        form, leaves = _form_of(row)
        where, columns = groups.setdefault(json.dumps(form), ([], [[] for _ in leaves]))
        where.append(number)
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    nodes = []
    for number, (form, (where, columns)) in enumerate(groups.items()):
        place = (*path, "rows" if len(groups) == 1 else f"rows_{number}")
        node: Node = {"form": json.loads(form), "where": None}
        if len(groups) > 1:
            node["where"] = out.put((*place, "where"), torch.tensor(where))
        node["columns"] = _write_form(node["form"], columns, out, place)
        nodes.append(node)
    return {"kind": "rows", "rows": len(rows), "groups": nodes}


def _form_of(row: Any) -> tuple[list[Any], list[Any]]:
    """What rows must have in common to lie in the same columns, as JSON, and the row's share of each column."""
    if isinstance(row, Tensor):
        return ["tensor", str(row.dtype), row.ndim], [row]
    if is_tensor_collection(row):
        layout, leaves = take_apart(row, stacked=False)
        if Leaf.ROW not in layout.kinds:
            return ["layout", layout_to_json(layout)], leaves
        parts = take_rows_apart([row])
        if parts is not None:
            return ["layout", layout_to_json(parts[0])], [column[0] for column in parts[1]]
        if hasattr(type(row), "from_message"):  # one message of a conversation
            return ["message", class_name(type(row))], [row.message]
        if row.batch_dims and len(row):  # a batch as a row: a lazy stack
            layout, columns = take_apart(row)
            return ["batch", layout_to_json(layout)], [len(row), *columns]
    elif is_container(row):
        entries: list[Any] = []
        shape = tree_to_json(row, entries)
        forms = [_form_of(entry) for entry in entries]
        return ["tree", shape, [[form, len(leaves)] for form, leaves in forms]], [
            leaf for _, leaves in forms for leaf in leaves
        ]
    elif type(row) is bytes:
        return ["bytes"], [_tensor_of(row)]
    elif _is_array(row):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asarray(row), allow_pickle=False)
        return ["numpy", type(row) is np.ndarray], [_tensor_of(buffer.getvalue())]
    return ["value"], [row]


def _write_form(form: list[Any], columns: list[Any], out: Container, path: Path) -> list[Any]:
    kind = form[0]
    if kind in ("tensor", "bytes", "numpy"):
        return [_write_column(Leaf.RAGGED, columns[0], out, path)]
    if kind == "message":
        return [_write_column(Leaf.DATA, columns[0], out, path)]
    if kind == "value":
        return [{"kind": "values", **_write_plain(columns[0], out, path)}]
    if kind == "tree":
        rest = iter(columns)
        return [
            _write_form(entry, list(islice(rest, count)), out, (*path, str(number)))
            for number, (entry, count) in enumerate(form[2])
        ]
    nodes = []
    if kind == "batch":
        nodes.append(out.put((*path, "lengths"), torch.tensor(columns[0])))
        columns = [
            torch.cat(column) if isinstance(column[0], Tensor) else list(chain.from_iterable(column))
            for column in columns[1:]
        ]
    for number, (leaf, column) in enumerate(zip(layout_from_json(form[1]).kinds, columns, strict=True)):
        nodes.append(_write_column(leaf, column, out, (*path, str(number))))
    return nodes


def _is_array(value: Any) -> bool:
    """True for a numpy array or number that holds no Python objects."""
    is_one = type(value) is np.ndarray or (isinstance(value, np.generic) and type(value) is value.dtype.type)
    return is_one and not value.dtype.hasobject


# --- back ---


def read_content(node: Node, source: Container) -> Any:
    """The value that ``write_content`` was given, in the memory of the CPU."""
    kind = node["kind"]
    if kind == "tensor":
        return source.get(node["tensor"])
    if kind == "jagged":
        lengths = source.get(node["lengths"]).tolist()
        return torch.nested.as_nested_tensor(list(source.get(node["values"]).split(lengths)), layout=torch.jagged)
    if kind == "data":
        return NonTensorData(_read_values(node["value"], source)[0], batch_size=node["batch_size"])
    if kind == "value":
        return _read_values(node["value"], source)[0]
    if kind == "tensordict":
        entries = {name: read_content(entry, source) for name, entry in node["entries"]}
        device = torch.device("cpu") if node["device"] else None
        return TensorDict(entries, batch_size=node["batch_size"], device=device, names=node["names"])
    if kind == "batch":
        layout = layout_from_json(node["layout"])
        columns = [
            _read_column(leaf, column, source) for leaf, column in zip(layout.kinds, node["columns"], strict=True)
        ]
        return put_together(layout, columns, node["rows"])
    if kind == "tree":
        leaves = [read_content(leaf, source) for leaf in node["leaves"]]
        return tree_from_json(node["shape"], iter(leaves))
    assert kind == "rows", kind
    return _read_rows(node, source)


def _read_column(leaf: Any, node: Node, source: Container) -> Any:
    kind = node["kind"]
    if kind == "values":
        values = _read_values(node, source)
        return [torch.Size(size) for size in values] if leaf is Leaf.SIZE else values
    if kind == "stacked":
        return list(source.get(node["tensor"]).unbind(0))
    if kind == "ragged":
        sizes = source.get(node["sizes"])
        parts = source.get(node["tensor"]).split(sizes.prod(-1).tolist())
        return [part.view(size) for part, size in zip(parts, sizes.tolist(), strict=True)]
    return read_content(node, source)


def _read_values(node: Node, source: Container) -> list[Any]:
    if node["as"] == "inline":
        return node["values"]
    if node["as"] == "rows":
        return _read_rows(node["rows"], source)
    data = source.get(node["data"]).numpy().tobytes()
    if node["as"] == "json":
        return json.loads(data)
    return object_from(data, "a value of the rows")


def _read_rows(node: Node, source: Container) -> list[Any]:
    rows: list[Any] = [None] * node["rows"]
    for group in node["groups"]:
        where = range(len(rows)) if group["where"] is None else source.get(group["where"]).tolist()
        values = _read_form(group["form"], group["columns"], source, len(where))
        for number, value in zip(where, values, strict=True):
            rows[number] = value
    return rows


def _read_form(form: list[Any], nodes: list[Any], source: Container, count: int) -> list[Any]:
    kind = form[0]
    if kind == "tensor":
        return _read_column(Leaf.RAGGED, nodes[0], source)
    if kind == "value":
        return _read_column(Leaf.DATA, nodes[0], source)
    if kind == "message":
        cls = find_class(form[1], lambda cls: hasattr(cls, "from_message"))
        return [cls.from_message(message) for message in _read_column(Leaf.DATA, nodes[0], source)]
    if kind == "bytes":
        return [data.numpy().tobytes() for data in _read_column(Leaf.RAGGED, nodes[0], source)]
    if kind == "numpy":
        arrays = [_read_array(data) for data in _read_column(Leaf.RAGGED, nodes[0], source)]
        return arrays if form[1] else [array[()] for array in arrays]
    if kind == "tree":
        entries = [_read_form(entry, part, source, count) for (entry, _), part in zip(form[2], nodes, strict=True)]
        rows = zip(*entries, strict=True) if entries else [()] * count
        return [tree_from_json(form[1], iter(row)) for row in rows]
    layout = layout_from_json(form[1])
    lengths = source.get(nodes[0]).tolist() if kind == "batch" else None
    columns = [
        _read_column(leaf, node, source)
        for leaf, node in zip(layout.kinds, nodes if lengths is None else nodes[1:], strict=True)
    ]
    if lengths is None:
        return put_rows_together(layout, columns, count)
    stops = list(accumulate(lengths))
    return [
        put_together(layout, [column[stop - length : stop] for column in columns], length)
        for length, stop in zip(lengths, stops, strict=True)
    ]


def _read_array(data: Tensor) -> np.ndarray:
    try:
        return np.lib.format.read_array(io.BytesIO(data.numpy().tobytes()), allow_pickle=False)
    except ValueError as error:
        raise CheckpointError(f"an array of a dump must be of plain numbers or text: {error}") from error
