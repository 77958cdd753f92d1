"""Conversations as ragged stacks: the messages stay the dicts that they came as until their TensorDicts are read.

A message is a dict in the chat format; as a row it has one entry for each of `FIELDS`, None where it lacks the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from llmrl.data.ragged.stack import LazyRows
from llmrl.data.ragged.tensordicts import inner, non_tensor, plain_value

__all__ = [
    "FIELDS",
    "MessageRow",
    "MessageStack",
    "join_message",
    "split_message",
    "stack_messages",
    "unstack_messages",
]

FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses", "extra")
Message = dict[str, Any]


class MessageStack(LazyRows):
    """One conversation: a stack of messages along its only dimension, which are shared and never changed."""

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> MessageStack:
        """A conversation over this very list, which must not be changed afterwards."""
        return cls.over(messages, len(messages))

    @property
    def messages(self) -> Sequence[Message]:
        """The messages, shared: to be read only."""
        source = self.source
        return [read_message(row) for row in self._rows] if source is None else source

    @property
    def device(self) -> None:
        return None

    @device.setter
    def device(self, value: Any) -> None:
        """Messages are on no device."""

    def _build(self) -> list[TensorDictBase]:
        return [MessageRow.from_message(message) for message in self.source]

    def _names(self) -> Any:
        return dict.fromkeys(FIELDS).keys()

    def _get_str(self, key: str, *default: Any, **kwargs: Any) -> Any:
        if not self._batch_size[0] and key in FIELDS:  # of no messages there is nothing to stack
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
        """A message over this very dict, which must not be changed afterwards."""
        self = cls.__new__(cls)
        self._message: Message | None = message
        self._entries: dict[str, Any] | None = None
        self._batch_size = torch.Size([])
        self._device = self._td_dim_names = None
        return self

    @property
    def message(self) -> Message:
        """The message, shared: to be read only."""
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
    """Messages of a collection of any number of dimensions, as nested lists; a single message for none."""
    td = td if isinstance(td, MessageStack) else inner(td)
    if isinstance(td, MessageStack):
        return td.messages
    if not td.batch_dims:
        return read_message(td)
    is_rows = isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0
    return [unstack_messages(member) for member in (td.tensordicts if is_rows else td.unbind(0))]


def stack_messages(nested: Any, ndim: int) -> TensorDictBase:
    """The inverse of `unstack_messages`; the lists are kept."""
    if ndim == 0:
        return MessageRow.from_message(nested)
    if ndim == 1:
        return MessageStack.from_messages(nested)
    if not nested:
        return LazyStackedTensorDict(stack_dim=0, batch_size=torch.Size([0] * (ndim - 1)))
    return LazyStackedTensorDict._new_lazy_unsafe(*[stack_messages(row, ndim - 1) for row in nested])
