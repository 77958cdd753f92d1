"""Converts values of a buffer to JSON and tensors, and back: for checkpoints, and for the layout of shared rows.

Scalars and text are written as JSON values; anything else is an object with a tag. Tensors are passed to ``put``, which
returns a JSON reference. Rows of the same form are written as columns: one tensor, or one JSON text, per entry. Classes
are stored by module and name and looked up on reading: in llmrl, tensordict, and modules that are already imported.
Devices are not stored: tensors are read into CPU memory.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, is_tensorclass
from tensordict.base import is_tensor_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from llmrl.data.ragged.layout import Layout, Leaf, is_leaf, put_rows_together, put_together, take_apart, take_rows_apart
from llmrl.data.ragged.tensordicts import dim_names, inner
from llmrl.errors import CheckpointError

Put = Callable[[tuple[str, ...], Tensor], Any]
Get = Callable[[Any], Tensor]

ITEM = "~"  # path element for an item of a sequence

_PACKAGES = ("llmrl", "tensordict")  # only modules of these packages are imported to find a class
_MOVED = {  # old -> new modules of row classes, for dumps written before the move
    "llmrl.data.llm.message_stack": "llmrl.data.ragged.stack",
    "llmrl.data.ragged.messages": "llmrl.data.ragged.stack",
    "llmrl.modules.llm.policies.ragged": "llmrl.data.ragged.stack",
    "llmrl.data.replay_buffers.layout": "llmrl.data.ragged.layout",
}
_INLINE = 2048  # longest JSON in bytes that stays in the manifest; longer columns are passed to ``put``
_SCALARS = (str, int, float, bool, type(None))
_MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


# --- out ---


def encode(value: Any, put: Put, path: tuple[str, ...] = ()) -> Any:
    """Converts ``value`` to JSON; passes its tensors to ``put`` with their paths of keys.

    Raises: CheckpointError that names a value which could only be read back by running code.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in _SEQUENCES.values():
        return {kind.__name__: [encode(entry, put, (*path, ITEM)) for entry in value]}
    if kind in _MAPPINGS.values() and all(type(key) in _SCALARS for key in value):
        return {kind.__name__: [[key, encode(entry, put, (*path, str(key)))] for key, entry in value.items()]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, put, path)
    # Classes are checked before instances: is_tensor_collection is also True for a tensorclass type.
    if isinstance(value, type) and _is_row_class(value):
        return {"class": _class_name(value)}
    if is_tensor_collection(value):
        return _encode_collection(value, put, path)
    if kind is bytes:
        return {"bytes": put(path, _as_tensor(value))}
    if _is_array(value):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
        return {"array": put(path, _as_tensor(file.getvalue())), "scalar": kind is not np.ndarray}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is Leaf:
        return {"leaf": value.value}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, pytree.TreeSpec):
        return {"spec": encode(pytree.tree_unflatten([0] * value.num_leaves, value), put, path)}
    if _is_record(value):
        entries = value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]
        return {"class": _class_name(kind), "entries": [encode(entry, put, (*path, ITEM)) for entry in entries]}
    return _encode_object(value, put, path)


def _encode_object(value: Any, put: Put, path: tuple[str, ...]) -> Any:
    return {"object": put(path, _as_tensor(object_bytes(value, f"the entry {'.'.join(path)!r} of the rows")))}


def _encode_tensor(value: Tensor, put: Put, path: tuple[str, ...]) -> Any:
    if value.is_nested and value.layout is torch.jagged:
        lengths = (*path[:-1], f"{path[-1] if path else ''}.lengths")
        return {"jagged": [put(path, value.values()), put(lengths, value.offsets().diff())]}
    if value.is_nested or value.layout is not torch.strided:
        return _encode_object(value, put, path)
    return {"tensor": put(path, value)}


def _encode_collection(value: Any, put: Put, path: tuple[str, ...]) -> Any:
    if type(value) is NonTensorData:
        return {"data": encode(value.data, put, path), "batch_size": list(value.batch_size)}
    if type(value) is TensorDict:
        return {
            "tensordict": [[name, encode(entry, put, (*path, name))] for name, entry in sorted(value.items())],
            "batch_size": list(value.batch_size),
            "names": dim_names(value),
            "device": value.device is not None,
        }
    if _is_message_class(type(value)):  # one message of a conversation
        return {"message": _class_name(type(value)), "value": encode(value.message, put, path)}
    value = value if value.device is None else value.to("cpu")
    rows = len(value) if value.batch_dims else None
    layout, columns = take_apart(value, stacked=rows is not None)
    nodes = []
    for number, column in enumerate(columns):
        write = encode_rows if rows is not None and type(column) is list else encode
        nodes.append(write(column, put, (*path, str(number))))
    return {"rows": rows, "layout": encode(layout, put), "columns": nodes}


def encode_rows(rows: list[Any], put: Put, path: tuple[str, ...] = ()) -> Any:
    """Converts a list of rows like ``encode``, but as columns: a Python call per value would take longer than the disk.

    Raises: CheckpointError, as ``encode``.
    """
    if _is_exact_json(rows):
        return _encode_plain(rows, put, path)
    # A column needs rows of one form; rows of several forms are written in groups, with the indices of their rows.
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(_form(row), []).append(number)
    path = (*path, ITEM)
    if len(groups) == 1:
        return _encode_group(*groups, rows, put, path)
    nodes = [
        [put((*path, "where"), torch.tensor(where)), _encode_group(form, [rows[row] for row in where], put, path)]
        for form, where in groups.items()
    ]
    return {"groups": nodes, "size": len(rows)}


def _form(value: Any) -> Any:
    """A key that is equal for rows that can be written as columns; None for rows that are written one by one."""
    kind = type(value)
    if isinstance(value, Tensor):
        return None if value.is_nested or value.layout is not torch.strided else (Tensor, value.dtype, value.ndim)
    if kind in _SCALARS:
        return "plain"
    if kind is dict and all([type(key) in _SCALARS for key in value]):
        return (dict, *[(type(key), key) for key in value])  # 1 and True are equal
    if kind in (list, tuple):
        return "plain" if kind is list and _is_exact_json(value) else (kind, len(value))
    if kind is torch.Size:
        return torch.Size
    if not is_tensor_collection(value) or isinstance(value, type) or kind is NonTensorData:
        return None
    td = inner(value)
    if type(td) is TensorDict and dim_names(td) is None:
        return (kind, td.device, *sorted(td.keys()))
    return kind if hasattr(type(td), "from_messages") else None


def _encode_group(form: Any, rows: list[Any], put: Put, path: tuple[str, ...]) -> Any:
    if form == "plain":
        return _encode_plain(rows, put, path)
    if form is torch.Size:
        return {"sizes": _encode_plain([list(size) for size in rows], put, path)}
    kind = form[0] if isinstance(form, tuple) else form
    if kind is Tensor:
        if len({row.shape for row in rows}) == 1:
            return {"tensors": put(path, torch.stack(rows)), "shapes": None}
        shapes = put((*path, "shapes"), torch.tensor([row.shape for row in rows]))
        return {"tensors": put(path, torch.cat([row.reshape(-1) for row in rows])), "shapes": shapes}
    if kind is dict:
        names = [name for _, name in form[1:]]
        columns = [encode_rows([row[name] for row in rows], put, (*path, str(name))) for name in names]
        return {"dicts": names, "columns": columns, "size": len(rows)}
    if kind in (list, tuple):
        columns = [encode_rows(list(column), put, path) for column in zip(*rows, strict=True)]
        return {"sequences": kind.__name__, "columns": columns, "size": len(rows)}
    apart = None if kind is None else take_rows_apart(rows)
    if apart is None:
        return {"list": [encode(row, put, path) for row in rows]}
    nodes = [encode_rows(column, put, (*path, str(number))) for number, column in enumerate(apart[1])]
    return {"single_rows": len(rows), "layout": encode(apart[0], put), "columns": nodes}


def _encode_plain(values: list[Any], put: Put, path: tuple[str, ...]) -> Any:
    data = json.dumps(values).encode()
    return {"plain": values} if len(data) <= _INLINE else {"json": put(path, _as_tensor(data))}


def _is_exact_json(value: Any) -> bool:
    """True if JSON restores exactly this value, with the same types at all levels."""
    kind = type(value)
    if kind is list:
        return all([_is_exact_json(entry) for entry in value])
    if kind is dict:
        return all([type(name) is str and _is_exact_json(entry) for name, entry in value.items()])
    return kind in _SCALARS


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _is_array(value: Any) -> bool:
    """True for a numpy array or scalar without Python objects."""
    plain = type(value) is np.ndarray or (isinstance(value, np.generic) and type(value) is value.dtype.type)
    return plain and not value.dtype.hasobject


def _is_record(value: Any) -> bool:
    """True for a named tuple or dataclass without state besides its fields."""
    if not _is_record_class(type(value)):
        return False
    names = set() if isinstance(value, tuple) else {field.name for field in fields(value)}
    return getattr(value, "__dict__", {}).keys() <= names and all(hasattr(value, name) for name in names)


def _is_record_class(cls: type) -> bool:
    if issubclass(cls, tuple):
        return bool(getattr(cls, "_fields", ()))
    return is_dataclass(cls) and not is_tensorclass(cls) and cls.__new__ is object.__new__


def _is_row_class(cls: type) -> bool:
    return is_tensorclass(cls) or hasattr(cls, "from_columns") or hasattr(cls, "from_messages")


def _is_message_class(cls: type) -> bool:
    return hasattr(cls, "from_message")


@cache
def _class_name(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    # Checked when writing: a local class could not be found when reading, and the dump would be lost.
    _find_class(name, lambda found: found is cls)
    return name


# --- back ---


def decode(node: Any, get: Get) -> Any:
    """The value that was passed to ``encode``; ``get`` resolves the references of ``put``. Runs no code from a file.

    Raises: CheckpointError for anything that ``encode`` does not write.
    """
    try:
        return _decode(node, get)
    # A manifest from elsewhere may be malformed in any way; callers should see a single error type.
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(
            f"a dump must hold values as dumps writes them: got {type(error).__name__} ({error}); load another one."
        ) from error


def _decode(node: Any, get: Get) -> Any:
    if not isinstance(node, dict):
        return node
    tag, content = next(iter(node.items()))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(entry, get) for entry in content])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(key, _decode(entry, get)) for key, entry in content])
    return _DECODERS[tag](node, get)


def _decode_jagged(node: Any, get: Get) -> Tensor:
    values, lengths = map(get, node["jagged"])
    return torch.nested.as_nested_tensor(list(values.split(lengths.tolist())), layout=torch.jagged)


def _decode_array(node: Any, get: Get) -> Any:
    file = io.BytesIO(get(node["array"]).numpy().tobytes())
    try:
        array = np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise CheckpointError(f"an array of a dump must be of plain numbers or text: {error}") from error
    return array[()] if node["scalar"] else array


def _decode_tensordict(node: Any, get: Get) -> TensorDict:
    entries = {name: _decode(entry, get) for name, entry in node["tensordict"]}
    device = torch.device("cpu") if node["device"] else None
    return TensorDict(entries, batch_size=node["batch_size"], device=device, names=node["names"])


def _decode_collection(node: Any, get: Get) -> Any:
    layout, columns = _decode_columns(node, get)
    if node["rows"] is not None:
        return put_together(layout, columns, node["rows"])
    columns = [column.unsqueeze(0) if isinstance(column, Tensor) else [column] for column in columns]
    return put_rows_together(layout, columns, 1)[0]


def _decode_columns(node: Any, get: Get) -> tuple[Layout, list[Any]]:
    layout, columns = _decode(node["layout"], get), [_decode(column, get) for column in node["columns"]]
    if not isinstance(layout, Layout) or len(columns) != len(layout.kinds):
        raise ValueError(f"a layout of {len(columns)} columns is needed")
    return layout, columns


def _decode_tensors(node: Any, get: Get) -> list[Tensor]:
    values = get(node["tensors"])
    if node["shapes"] is None:
        return list(values.unbind(0))
    shapes = get(node["shapes"])
    parts = values.split(shapes.prod(-1).tolist())
    return [part.view(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]


def _decode_trees(node: Any, get: Get) -> list[Any]:
    columns = [_decode(column, get) for column in node["columns"]]
    rows = zip(*columns, strict=True) if columns else [()] * node["size"]
    if "dicts" in node:
        return [dict(zip(node["dicts"], row, strict=True)) for row in rows]
    return list(rows) if node["sequences"] == "tuple" else [list(row) for row in rows]


def _decode_groups(node: Any, get: Get) -> list[Any]:
    rows: list[Any] = [None] * node["size"]
    for where, group in node["groups"]:
        for number, row in zip(get(where).tolist(), _decode(group, get), strict=True):
            rows[number] = row
    return rows


def _decode_class(node: Any, get: Get) -> Any:
    if "entries" not in node:
        return _find_class(node["class"], _is_row_class)
    cls = _find_class(node["class"], _is_record_class)
    entries = [_decode(entry, get) for entry in node["entries"]]
    if issubclass(cls, tuple):
        return tuple.__new__(cls, entries)
    out = object.__new__(cls)  # calling a constructor would run code that the file chooses
    for field, entry in zip(fields(cls), entries, strict=True):
        object.__setattr__(out, field.name, entry)
    return out


_DECODERS: dict[str, Callable[[Any, Get], Any]] = {
    "tensor": lambda node, get: get(node["tensor"]),
    "jagged": _decode_jagged,
    "bytes": lambda node, get: get(node["bytes"]).numpy().tobytes(),
    "array": _decode_array,
    "size": lambda node, get: torch.Size(node["size"]),
    "leaf": lambda node, get: Leaf(node["leaf"]),
    "device": lambda node, get: torch.device(node["device"]),
    "dtype": lambda node, get: find_dtype(node["dtype"]),
    "spec": lambda node, get: pytree.tree_structure(_decode(node["spec"], get), is_leaf=is_leaf),
    "class": _decode_class,
    "message": lambda node, get: _find_class(node["message"], _is_message_class).from_message(
        _decode(node["value"], get)
    ),
    "data": lambda node, get: NonTensorData(_decode(node["data"], get), batch_size=node["batch_size"]),
    "tensordict": _decode_tensordict,
    "rows": _decode_collection,
    "plain": lambda node, get: node["plain"],
    "json": lambda node, get: json.loads(get(node["json"]).numpy().tobytes()),
    "sizes": lambda node, get: [torch.Size(size) for size in _decode(node["sizes"], get)],
    "tensors": _decode_tensors,
    "dicts": _decode_trees,
    "sequences": _decode_trees,
    "groups": _decode_groups,
    "single_rows": lambda node, get: put_rows_together(*_decode_columns(node, get), node["single_rows"]),
    "object": lambda node, get: object_from(get(node["object"]).numpy().tobytes(), "a value of the rows"),
}


def find_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a checkpoint holds {name!r}, which this torch ({torch.__version__}) lacks.")
    return dtype


@cache
def _find_class(name: str, fits: Callable[[type], bool]) -> type:
    """The class of that name. Imports only modules of ``_PACKAGES`` and runs no code during the lookup."""
    module, _, path = name.partition(":")
    module = _MOVED.get(module, module)
    try:
        if module.partition(".")[0] in _PACKAGES:
            importlib.import_module(module)
        found: Any = sys.modules[module]
        for part in path.split("."):
            found = vars(found)[part]  # not getattr, which may run a module's __getattr__ or a descriptor
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the class {name} of rows in a dump cannot be found ({error!r}); define it at the top of a module, and "
            "import that before loading."
        ) from error
    if not (isinstance(found, type) and fits(found)):
        raise CheckpointError(f"a dump must name a class of rows where it has {name}; load another one.")
    return found


# --- Python values that JSON cannot represent ---


def object_bytes(value: Any, who: str) -> bytes:
    """``value`` as bytes of ``torch.save``.

    Raises: CheckpointError, prefixed with ``who``, for values that could only be read back by running code.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        # Reading it back finds values that loading would reject later, when the buffer no longer exists.
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{who}: a dump must hold tensors, numbers, strings, None, lists, tuples, dicts, tensordicts and "
            f"tensorclasses: got {_refused(file.getvalue(), error)}; store what it is made of, or keep it out of the "
            "dump."
        ) from error
    return file.getvalue()


def object_from(data: bytes, who: str) -> Any:
    """The value that was passed to ``object_bytes``, read without running code. Raises: CheckpointError."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{who} must hold data, as dumps writes it: got {_refused(data, error)}; load another dump."
        ) from error


def _refused(data: bytes, error: Exception) -> str:
    """The classes and functions that reading would call; the error text if they cannot be determined."""
    try:
        names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # a pickle that torch did not write, or a truncated one
        names = ""
    return names or ("what only code could read" if isinstance(error, UnpicklingError) else str(error))
