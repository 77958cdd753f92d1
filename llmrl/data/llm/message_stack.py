"""The storage behind `History`: a stack of messages that stays a plain list until somebody asks for TensorDicts.

A rollout appends to thousands of conversations; one TensorDict per message would cost more than the rest of the step.
So a conversation keeps its messages as the dicts they came as, and builds the stack's members when ``tensordicts`` is
first used; a member builds its entries when one is first read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from llmrl.data.llm.templates import Message

FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses", "extra")
_NO_DIMS = torch.Size([])


class MessageStack(LazyStackedTensorDict):
    """One conversation: a stack of messages along its only dimension.

    Messages are shared between conversations and never changed: what writes to a stack goes through ``tensordicts``,
    after which the members, and no longer the list, are what the conversation says.
    """

    def __init__(self, *tensordicts: TensorDictBase, stack_dim: int = 0, **options: Any) -> None:
        super().__init__(*tensordicts, stack_dim=stack_dim, **options)  # options: the base class's own

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> MessageStack:
        """A conversation over this very list, which must not be changed afterwards."""
        self = cls.__new__(cls)
        self._is_locked = None
        self._messages = messages
        self._members = None
        self.stack_dim = 0
        self._batch_size = torch.Size([len(messages)])
        self.hook_out = self.hook_in = None
        return self

    @property
    def messages(self) -> Sequence[Message]:
        """The messages, shared: to be read only."""
        return self._messages if self._members is None else [read_message(_plain(member)) for member in self._members]

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        if self._members is None:
            self._members = [MessageRow.from_message(message) for message in self._messages]
            self._messages = None
            if self._is_locked:
                for member in self._members:
                    member._propagate_lock(is_compiling=False)
        return self._members

    @tensordicts.setter
    def tensordicts(self, members: Sequence[TensorDictBase]) -> None:
        self._messages = None
        self._members = list(members)

    # Questions that every container asks of what it holds, answered without building members

    @property
    def device(self) -> None:
        return None

    @device.setter
    def device(self, value: Any) -> None:
        """Messages are on no device."""

    @property
    def names(self) -> list[str | None]:
        return [None] * len(self._batch_size)

    def _has_names(self) -> bool:
        return False

    @property
    def _is_memmap(self) -> bool:
        return self._members is not None and all(member._is_memmap for member in self._members)

    @property
    def _is_shared(self) -> bool:
        return self._members is not None and all(member._is_shared for member in self._members)

    @property
    def is_locked(self) -> bool:
        return bool(self._is_locked) if self._members is None else LazyStackedTensorDict.is_locked.fget(self)

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        if self._members is None:
            self._is_locked = True
        else:
            super()._propagate_lock(lock_parents_weakrefs, is_compiling=is_compiling)

    def _propagate_unlock(self) -> list[Any]:
        if self._members is None:
            self._is_locked = None
            return []
        return super()._propagate_unlock()

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        if self._members is None and not args and not kwargs:
            return dict.fromkeys(FIELDS).keys()
        return super().keys(*args, **kwargs)

    def _get_str(self, key: str, *default: Any, **kwargs: Any) -> Any:
        if not self._batch_size[0] and key in FIELDS:  # of no messages there is nothing to stack
            return [] if kwargs.get("as_list") else NonTensorStack(stack_dim=0)
        return super()._get_str(key, *default, **kwargs)

    def _clone(self, recurse: bool = True) -> MessageStack:
        return MessageStack.from_messages(list(self.messages))

    def _unbind(self, dim: int) -> tuple[TensorDictBase, ...]:
        return (
            tuple(MessageRow.from_message(message) for message in self.messages) if dim == 0 else super()._unbind(dim)
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, int) and not isinstance(index, bool):
            return MessageRow.from_message(self.messages[index])
        if isinstance(index, slice):
            return MessageStack.from_messages(self.messages[index])
        return super().__getitem__(index)


class MessageRow(TensorDict):
    """One message: a TensorDict without batch dimensions that builds its entries on first use.

    Every field of `History` is an entry, ``None`` where the message does not have it.
    """

    @classmethod
    def from_message(cls, message: Message) -> MessageRow:
        """A message over this very dict, which must not be changed afterwards."""
        self = cls.__new__(cls)
        self._message: Message | None = message
        self._entries: dict[str, Any] | None = None
        self._batch_size = _NO_DIMS
        self._device = self._td_dim_names = None
        return self

    @property
    def message(self) -> Message:
        """The message, shared: to be read only."""
        if self._entries is None:
            return self._message
        values = {name: self._entries.get(name) for name in FIELDS}
        return join_message({name: value.data if is_non_tensor(value) else value for name, value in values.items()})

    @property
    def _tensordict(self) -> dict[str, Any]:
        if self._entries is None:
            template = TensorDict._new_unsafe({}, batch_size=_NO_DIMS)
            for name, value in split_message(self._message).items():
                template._tensordict[name] = NonTensorData(value, batch_size=_NO_DIMS)
            self._entries = template._tensordict
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


def read_message(td: TensorDictBase) -> Message:
    """The message of a TensorDict without batch dimensions."""
    if isinstance(td, MessageRow):
        return td.message
    values = {name: td._get_str(name, None) for name in FIELDS}
    return join_message({name: value.data if is_non_tensor(value) else value for name, value in values.items()})


def split_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message's keys by field of `History`; keys that are no field go to ``extra``."""
    fields = {name: message.get(name) for name in FIELDS}
    fields["is_complete"] = message.get("is_complete", True)
    extra = {key: value for key, value in message.items() if key not in FIELDS}
    fields["extra"] = extra or None
    return fields


def join_message(fields: Mapping[str, Any]) -> Message:
    """The inverse of :func:`split_message`: fields that say nothing are left out."""
    message: Message = {"role": fields["role"], "content": fields["content"]}
    if fields.get("is_complete") is False:
        message["is_complete"] = False
    for name in ("tool_calls", "tool_responses"):
        if fields.get(name) is not None:
            message[name] = fields[name]
    return message | (fields.get("extra") or {})


def nested_messages(td: TensorDictBase) -> Any:
    """Messages of a TensorDict of any number of dimensions, as nested lists; a single message for none."""
    if isinstance(td, MessageStack):
        return td.messages
    if not td.batch_dims:
        return read_message(td)
    return [nested_messages(_plain(member)) for member in (td.tensordicts if _is_rows(td) else td.unbind(0))]


def stack_nested(nested: Any, ndim: int) -> TensorDictBase:
    """The inverse of :func:`nested_messages`."""
    if ndim == 0:
        return MessageRow.from_message(nested)
    if ndim == 1:
        return MessageStack.from_messages(nested)
    if not nested:
        return LazyStackedTensorDict(stack_dim=0, batch_size=torch.Size([0] * (ndim - 1)))
    return LazyStackedTensorDict._new_lazy_unsafe(*[stack_nested(row, ndim - 1) for row in nested])


def _is_rows(td: TensorDictBase) -> bool:
    return isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0


def _plain(td: Any) -> TensorDictBase:
    return td if isinstance(td, TensorDictBase) else td._tensordict
