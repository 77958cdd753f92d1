"""Ragged stacks: lazy stacks that store their data in another form until a row is accessed.

A rollout writes and reads thousands of conversations column by column. One small TensorDict per row and container would
cost more than the rest of the step, so the rows are built on first access (``unbind``, ``torch.stack``, a write). A
`RaggedStack` stores columns; a `MessageStack` stores the messages of a conversation as the original dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorStack, TensorDict, TensorDictBase
from tensordict.base import NO_DEFAULT
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmrl.data.ragged.tensordicts import (
    LazyCopy,
    bare_tensordict,
    column,
    inner,
    new_tensordict,
    non_tensor,
    plain_value,
)

FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses", "extra")
Message = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """``torch.compiler.disable`` for methods: its own annotations lose ``self``, so type checkers refuse the call."""
    return torch.compiler.disable(function)


class LazyRows(LazyStackedTensorDict):
    """A lazy stack over dimension 0 that builds its rows on first access, by calling ``source()``.

    ``ragged(path)`` returns the `LazyCopy` of an entry, for readers that pad, or None. After the first access the
    rows hold the data and this is an ordinary lazy stack. Both functions are pickled with the stack.

    Subclasses may store another kind of source: they override `_build`, and serve reads from the source where they can.
    """

    source: Any = None  # None once the rows are built
    _ragged: Callable[[tuple[str, ...]], LazyCopy | None] | None = None

    @classmethod
    def over(
        cls, source: Any, batch_size: torch.Size, ragged: Callable[[tuple[str, ...]], LazyCopy | None] | None = None
    ) -> Self:
        """A stack over this source, which is kept by reference."""
        self = cls.__new__(cls)
        self._is_locked = None
        self.stack_dim = 0
        self.hook_out = self.hook_in = None
        self._batch_size = batch_size
        self.source, self._ragged, self._added = source, ragged, {}
        return self

    def _build(self) -> list[TensorDictBase]:
        return self.source()

    def _names(self) -> Any:
        """The keys of the entries, as a view like ``dict.keys()``."""
        return super().keys()

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        if self.source is not None:
            self._build_rows()
        return self._rows

    @tensordicts.setter
    def tensordicts(self, rows: Sequence[TensorDictBase]) -> None:
        self._rows = list(rows)
        self.source = None

    @not_compiled  # compiled code must not specialise on how a source builds its rows
    def _build_rows(self) -> None:
        self._rows = self._build()
        self.source = None
        for name, value in self._added.items():  # what `set_later` kept
            for row, part in zip(self._rows, value.unbind(0), strict=True):
                row.set(name, part)
        if self._is_locked:
            for row in self._rows:
                row._propagate_lock(is_compiling=False)

    # Methods below avoid building the rows.

    def get(self, key: NestedKey, default: Any = NO_DEFAULT, *args: Any, **kwargs: Any) -> Any:
        if self._ragged is not None and self.source is not None and kwargs.get("as_padded_tensor"):
            path = (key,) if isinstance(key, str) else tuple(key)
            rows = None if path[0] in self._added else self._ragged(path)  # later entries win
            if rows is not None and kwargs.keys() <= {"as_padded_tensor", "padding_value", "padding_side"}:
                return rows.padded(kwargs.get("padding_value", 0), kwargs.get("padding_side", "right"))
        return super().get(key, default, *args, **kwargs)

    def set_later(self, name: str, value: Tensor) -> bool:
        """Stores an entry until the rows are built; False if they are built or locked, or if its shape does not fit."""
        if self.source is None or self._is_locked or value.shape[: len(self._batch_size)] != self._batch_size:
            return False
        self._added[name] = value
        return True

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        if self.source is None or args or kwargs:
            return super().keys(*args, **kwargs)
        return self._names()

    @property
    def names(self) -> list[str | None]:
        if self.source is None:
            return super().names
        return [self._td_dim_name, *[None] * (len(self._batch_size) - 1)]

    @names.setter
    def names(self, value: Sequence[str] | None) -> None:
        self._set_names(value)

    def _has_names(self) -> bool:
        return self.source is None and super()._has_names()

    @property
    def _is_memmap(self) -> bool:
        return self.source is None and super()._is_memmap

    @property
    def _is_shared(self) -> bool:
        return self.source is None and super()._is_shared

    @property
    def is_locked(self) -> bool:
        return bool(self._is_locked) if self.source is not None else super().is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        if self.source is not None:
            self._is_locked = True  # the rows are locked when they are built
        else:
            super()._propagate_lock(lock_parents_weakrefs, is_compiling=is_compiling)

    def _propagate_unlock(self) -> list[Any]:
        if self.source is None:
            return super()._propagate_unlock()
        self._is_locked = None
        return []


class RaggedStack(LazyRows):
    """Rows as columns: each a list of B tensors of any shapes or of B strings, a Tensor[B, ...], or a collection [B].

    Columns that are `LazyCopy` are copied when they are first read; ``stack.get(key, as_padded_tensor=True)`` pads
    them directly from their owner's memory. ``stack.get(key, as_list=True)`` returns the list itself; do not change it.

    >>> rows = RaggedStack.from_columns({"ids": [torch.arange(2), torch.arange(3)]}, 2)
    >>> rows.get("ids", as_list=True)[1].tolist(), rows[0]["ids"].tolist(), rows[1:].batch_size
    ([0, 1, 2], [0, 1], torch.Size([1]))
    """

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], num_rows: int) -> RaggedStack:
        """A stack over these columns, not copied, each ``num_rows`` long; a tensor column may be a `LazyCopy`."""
        return cls.over(dict(columns), torch.Size([num_rows])) if num_rows else cls(stack_dim=0)

    def own_columns(self) -> dict[str, Any] | None:
        """The columns, with every `LazyCopy` replaced by copies; None once the rows hold the data."""
        for name, values in (self.source or {}).items():
            if type(values) is LazyCopy:
                self.source[name] = values.copies()
        return self.source

    def _build(self) -> list[TensorDictBase]:
        columns = {name: _cells(values) for name, values in self.own_columns().items()}
        rows = [new_tensordict(dict(zip(columns, cells, strict=True))) for cells in zip(*columns.values(), strict=True)]
        return rows or [new_tensordict({}) for _ in range(self._batch_size[0])]

    def _names(self) -> Any:
        return self.source.keys()

    @property
    def device(self) -> torch.device | None:
        return None if self.source is not None else super().device

    @device.setter
    def device(self, value: Any) -> None:
        LazyStackedTensorDict.device.fset(self, value)

    def _get_str(self, key: str, default: Any = None, **kwargs: Any) -> Any:
        if self.source is None:
            return super()._get_str(key, default, **kwargs)
        if key not in self.source:
            return self._default_get(key, default)
        values, as_list = self.source[key], kwargs.get("as_list", False)
        padding = kwargs.get("padding_value", 0.0), kwargs.get("padding_side", "right")
        pads = kwargs.get("as_padded_tensor", False) and not as_list
        if type(values) is LazyCopy:
            if pads:
                return values.padded(*padding)
            values = self.source[key] = values.copies()
        if not isinstance(values, list):
            return list(values.unbind(0)) if as_list else values
        if as_list:
            return values
        if isinstance(values[0], str):
            return column(values)
        if pads:
            return pad_sequence(values, batch_first=True, padding_value=padding[0], padding_side=padding[1])
        return super()._get_str(key, default, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        rows = None if self.source is None else _row_numbers(index, self._batch_size[0])
        if rows is None:
            return super().__getitem__(index)
        columns = {
            name: [values[row] for row in rows] if isinstance(values, list) else values[index]
            for name, values in self.own_columns().items()
        }
        return type(self).from_columns(columns, len(rows))

    def _clone(self, recurse: bool = True) -> RaggedStack:
        if self.source is None:
            return super()._clone(recurse)
        columns = {name: _clone_column(values, recurse) for name, values in self.own_columns().items()}
        return type(self).from_columns(columns, self._batch_size[0])


def stack_columns(columns: Mapping[str, Any], batch_size: Sequence[int]) -> TensorDictBase:
    """Columns of ``prod(batch_size)`` values as a tensordict of that batch size; a single row is a plain TensorDict."""
    if not len(batch_size):
        return new_tensordict({name: _cells(values)[0] for name, values in columns.items()})
    if len(batch_size) == 1:
        return RaggedStack.from_columns(columns, batch_size[0])
    size = torch.Size(batch_size[1:]).numel()
    parts = [slice(row * size, (row + 1) * size) for row in range(batch_size[0])]
    return LazyStackedTensorDict(
        *[stack_columns({name: values[part] for name, values in columns.items()}, batch_size[1:]) for part in parts]
    )


def _cells(values: Any) -> Sequence[Any]:
    if not isinstance(values, list):
        return values.unbind(0)
    return [non_tensor(value) for value in values] if isinstance(values[0], str) else values


def _clone_column(values: Any, recurse: bool) -> Any:
    if isinstance(values, Tensor):
        return values.clone() if recurse else values
    if not isinstance(values, list):
        return values.clone(recurse)
    return [value.clone() for value in values] if recurse and not isinstance(values[0], str) else list(values)


def _row_numbers(index: Any, num_rows: int) -> list[int] | None:
    """The rows that an index along the first dimension selects; None for every other kind of index."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, slice):
        return list(range(num_rows))[index]
    if isinstance(index, Tensor) and index.ndim == 1 and index.numel():
        if index.dtype == torch.bool:
            return index.nonzero().squeeze(1).tolist() if index.shape[0] == num_rows else None
        return None if index.dtype.is_floating_point else index.tolist()
    if isinstance(index, list | range) and index and all(type(row) is int for row in index):
        return list(index)
    return None


# --- entries of batches -----------------------------------------------------------------------------------------------


def set_entry(batch: TensorDictBase, key: str | tuple[str, ...], value: Tensor) -> None:
    """``batch.set(key, value)``, in a tenth of the time if the value needs no conversion."""
    *path, name = (key,) if isinstance(key, str) else key
    if type(batch) is LazyRows and not path and batch.set_later(name, value):
        return
    td: Any = batch
    for part in path:
        td = td._tensordict.get(part) if type(td) is TensorDict else None
    if _takes(td, value):
        td._tensordict[name] = value
    else:
        batch.set(key, value)


def with_entry(batch: TensorDictBase, name: str, value: Tensor) -> TensorDictBase:
    """A shallow copy of the batch with one more entry; the given batch is not changed."""
    if _takes(batch, value) and batch._td_dim_names is None:
        return bare_tensordict({**batch._tensordict, name: value}, batch._batch_size, batch._device)
    batch = batch.copy()
    batch.set(name, value)
    return batch


def _takes(batch: Any, value: Tensor) -> bool:
    return (
        type(batch) is TensorDict
        and not batch._is_locked
        and value.shape[: len(batch._batch_size)] == batch._batch_size
        and (batch._device is None or batch._device == value.device)
    )


# --- conversations: a message has one entry for each of `FIELDS`, None if it lacks the field --------------------


class MessageStack(LazyRows):
    """One conversation: a 1-d stack of messages, which are shared and never changed."""

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> MessageStack:
        """A conversation over this list, not a copy; the list must not be changed afterwards."""
        return cls.over(messages, torch.Size([len(messages)]))

    @property
    def messages(self) -> Sequence[Message]:
        """The messages, shared; do not change them."""
        source = self.source
        return [read_message(row) for row in self._rows] if source is None else source

    @property
    def device(self) -> None:
        return None

    @device.setter
    def device(self, value: Any) -> None:
        """Ignored: messages have no device."""

    def _build(self) -> list[TensorDictBase]:
        return [MessageRow.from_message(message) for message in self.source]

    def _names(self) -> Any:
        return dict.fromkeys(FIELDS).keys()

    def _get_str(self, key: str, *default: Any, **kwargs: Any) -> Any:
        if not self._batch_size[0] and key in FIELDS:  # no messages: nothing to stack
            return [] if kwargs.get("as_list") else NonTensorStack(stack_dim=0)
        return super()._get_str(key, *default, **kwargs)

    def _clone(self, recurse: bool = True) -> MessageStack:
        return MessageStack.from_messages(list(self.messages))

    def _unbind(self, dim: int) -> tuple[TensorDictBase, ...]:
        return tuple(map(MessageRow.from_message, self.messages)) if dim == 0 else super()._unbind(dim)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, int) and not isinstance(index, bool):
            return MessageRow.from_message(self.messages[index])
        if isinstance(index, slice):
            return MessageStack.from_messages(self.messages[index])
        return super().__getitem__(index)


class MessageRow(TensorDict):
    """One message: a TensorDict without batch dimensions that builds its entries on first access."""

    @classmethod
    def from_message(cls, message: Message) -> MessageRow:
        """A message over this dict, not a copy; the dict must not be changed afterwards."""
        self = cls.__new__(cls)
        self._message: Message | None = message
        self._entries: dict[str, Any] | None = None
        self._batch_size = torch.Size([])
        self._device = self._td_dim_names = None
        return self

    @property
    def message(self) -> Message:
        """The message, shared; do not change it."""
        if self._entries is None:
            return self._message
        return join_message({name: plain_value(self._entries.get(name)) for name in FIELDS})

    @property
    def _tensordict(self) -> dict[str, Any]:
        if self._entries is None:
            self._entries = {name: non_tensor(value) for name, value in split_message(self._message).items()}
            self._message = None
        return self._entries

    @_tensordict.setter
    def _tensordict(self, entries: dict[str, Any]) -> None:
        self._message = None
        self._entries = entries

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        if self._entries is None and not args and not kwargs:
            return dict.fromkeys(FIELDS).keys()
        return super().keys(*args, **kwargs)

    def _clone(self, recurse: bool = True) -> TensorDict:
        return MessageRow.from_message(self.message) if not self._batch_size else super()._clone(recurse)


def read_message(row: Any) -> Message:
    """The message of a tensor collection without batch dimensions."""
    td = inner(row)
    if isinstance(td, MessageRow):
        return td.message
    return join_message({name: plain_value(td._get_str(name, None)) for name in FIELDS})


def split_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message's values by field; keys that are not fields go to ``extra``."""
    fields = {name: message.get(name) for name in FIELDS}
    fields["is_complete"] = message.get("is_complete", True)
    fields["extra"] = {key: value for key, value in message.items() if key not in FIELDS} or None
    return fields


def join_message(fields: Mapping[str, Any]) -> Message:
    """The inverse of `split_message`: fields without a value are left out."""
    message: Message = {"role": fields["role"], "content": fields["content"]}
    if fields.get("is_complete") is False:
        message["is_complete"] = False
    for name in ("tool_calls", "tool_responses"):
        if fields.get(name) is not None:
            message[name] = fields[name]
    return message | (fields.get("extra") or {})


def unstack_messages(td: Any) -> Any:
    """Messages of a collection with any number of batch dimensions, as nested lists; without any, a single message."""
    td = td if isinstance(td, MessageStack) else inner(td)
    if isinstance(td, MessageStack):
        return td.messages
    if not td.batch_dims:
        return read_message(td)
    is_rows = isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0
    return [unstack_messages(member) for member in (td.tensordicts if is_rows else td.unbind(0))]


def stack_messages(nested: Any, ndim: int) -> TensorDictBase:
    """The inverse of `unstack_messages`; keeps the innermost lists by reference."""
    if ndim == 0:
        return MessageRow.from_message(nested)
    if ndim == 1:
        return MessageStack.from_messages(nested)
    if not nested:
        return LazyStackedTensorDict(stack_dim=0, batch_size=torch.Size([0] * (ndim - 1)))
    return LazyStackedTensorDict._new_lazy_unsafe(*[stack_messages(row, ndim - 1) for row in nested])
