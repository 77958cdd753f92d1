"""`History`: conversations in the chat format, as a tensorclass that batches, slices and renders.

A History is a view for people, tools and environments. Training uses the stream of token ids, which is never rebuilt
from a History.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from reprlib import Repr
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorClass

from llmrl.data.llm.templates import ChatTemplate, Message, find_template
from llmrl.data.ragged.stack import FIELDS, join_message, split_message, stack_messages, unstack_messages
from llmrl.data.ragged.tensordicts import fill, inner, rewrap
from llmrl.data.specs import Composite, NonTensor
from llmrl.errors import ConfigError, DataError, ShapeError, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 20  # conversations, in a notebook
_PADDING_ROLE = "<none>"  # a message of this role only fills a dense batch; it is never rendered


class GrowthError(ShapeError, RuntimeError):
    """A history cannot take these messages: they have another shape, or it has no dimension to grow along."""


class History(TensorClass["nocast"]):
    """Conversations: the last batch dimension counts messages, the ones before it count conversations.

    Fields  role, content   a string per message; ``content`` may also be a list of parts, or None
            is_complete     False for a message that was cut off
            tool_calls      the calls an assistant message makes, in the format of the Transformers library
            tool_responses  their results, for templates that expect them here
            extra           a dict with every other key of the message

    ``History(role="user", content="Hi")`` is one message (batch size []), lists make a conversation [M], lists of lists
    a batch [B, M] whose conversations may differ in length ([B, -1]). Messages are shared between histories and never
    changed; appending costs as much as copying a list. A History holds no tensors, so it has no device.

    >>> history = History.from_chats([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hello"}]])
    >>> answer = History(role=["assistant", "assistant"], content=["Hi!", "Hello!"])
    >>> history.append(answer).shape
    torch.Size([2, 2])
    >>> history[..., -1].content
    ['Hi!', 'Hello!']
    """

    role: str
    content: Any
    is_complete: bool = True
    tool_calls: Any = None
    tool_responses: Any = None
    extra: Any = None

    # Construction (``__init__`` is set below: a tensorclass generates its own)

    @classmethod
    def from_chats(cls, chats: Sequence[Sequence[Message]] | Sequence[Message]) -> History:
        """Lists of messages -> [B, M], or [B, -1] if they differ in length; one list of messages -> [M].

        The dicts are copied, not kept. Raises DataError for a message without a role.
        """
        chats = list(chats)
        if chats and isinstance(chats[0], Mapping):
            return cls._of(_copy_messages(chats, "History.from_chats"), 1)
        return cls._of([_copy_messages(chat, "History.from_chats") for chat in chats], 2)

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> History:
        """One conversation -> [M], as `from_chats`."""
        return cls._of(_copy_messages(messages, "History.from_messages"), 1)

    @classmethod
    def stack(cls, rows: Sequence[History], dim: int = 0) -> History:
        """Stacks histories with the same number of dimensions along a new first one; lengths may differ.

        Raises  ShapeError if the numbers of dimensions differ, or for another ``dim``
        """
        ndims = {row.ndim for row in rows}
        if dim != 0 or len(ndims) != 1:
            raise ShapeError(
                f"History.stack: histories must have the same number of dimensions, and dim must be 0: got dim {dim} "
                f"and {sorted(ndims)} dimensions."
            )
        return cls._of([row._nested for row in rows], ndims.pop() + 1)

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> History:
        """Reads rendered text back: a string -> [M], a list of strings -> [B, -1].

        Reads   the format of ``chat_template``, else of ``chat_template_name``, else of the tokenizer's template, else
                ChatML
        Raises  TemplateError if the format has no parser, if that fails, or if a text holds no message; DataError for
                other objects than text

        A message whose end marker is missing has ``is_complete`` False. For people and tools: training never reads ids
        from here.

        >>> History.from_text("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHel").is_complete
        [True, False]
        """
        row = find_template(tokenizer, chat_template_name, template=chat_template)
        if row.parse is None:
            raise TemplateError(
                f"History.from_text: template {row.name!r} must have an inverse parser: got none; give one to "
                "add_chat_template, or name a template that has one."
            )
        texts = [text] if isinstance(text, str) or not isinstance(text, Iterable) else list(text)
        chats = [_copy_messages(_parsed(row, part), f"the parser of template {row.name!r}") for part in texts]
        return cls._of(chats[0], 1) if isinstance(text, str) else cls._of(chats, 2)

    # Growing

    def append(self, history: History, *, inplace: bool = True, dim: int = -1) -> History:
        """Adds one message to each conversation (``dim=-1``), or one conversation to the batch (``dim=0``).

        Reads    history  one dimension fewer than self, of the shape of self without ``dim``
        Returns  self if ``inplace``, else a new History
        Raises   GrowthError, a ShapeError and RuntimeError, for any other shape
        """
        _check_history(history, "append")
        if history.ndim != self.ndim - 1:
            raise GrowthError(
                f"History.append: the new history must have one dimension fewer than this one: got {history.ndim} and "
                f"{self.ndim}; index it, or unsqueeze this one, or use extend."
            )
        depth = self._depth(dim)
        return self._grown(_wrap(history._nested, depth), depth, "append", inplace)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Adds messages to each conversation (``dim=-1``), or conversations to the batch (``dim=0``).

        Reads    history  as many dimensions as self
        Returns  self if ``inplace``, else a new History
        Raises   GrowthError, a ShapeError and RuntimeError, for any other shape
        """
        _check_history(history, "extend")
        if not self.ndim or history.ndim != self.ndim:
            raise GrowthError(
                f"History.extend: The new history to extend with must have the dimensions of this one, at least one: "
                f"got {history.ndim} and {self.ndim}; unsqueeze the shorter one, or use append."
            )
        return self._grown(history._nested, self._depth(dim), "extend", inplace)

    # Reading

    def to_chats(self) -> list[Any]:
        """Messages as dicts: a list for [M], lists of lists for [B, M]; padding messages are left out.

        The dicts are copies, without ``is_complete``: ready for ``tokenizer.apply_chat_template``.
        """
        if not self.ndim:
            raise ShapeError(
                "History.to_chats: a conversation must have a dimension of messages: got one; unsqueeze(0) it."
            )
        return _nested_chats(self._nested, self.ndim)

    def apply_chat_template(self, **options: Any) -> Any:
        """Renders the conversations for a model. Keywords: the fields of `Encoding`, and template variables.

        Returns  text by default: a string for [M], a list for [B, M]. Ids with ``tokenize``, which masks,
                 ``return_tensors="pt"`` and dicts imply: int64[T] for [M], a list for [B, M], int64[B, T] with
                 ``padding``. With ``return_dict`` "input_ids" int64[T], "attention_mask" bool[T], a processor's own
                 entries, and with ``return_assistant_tokens_mask`` "assistant_masks" bool[T] (True where the assistant
                 wrote the token, its end-of-turn token included): a lazy stack of B rows, dense with ``padding``
        Raises   TemplateError if the conversation does not fit the template, ConfigError for arguments that exclude
                 each other
        """
        if self.ndim > 2:
            raise ShapeError(
                f"History.apply_chat_template: a batch must have shape [M] or [B, M]: got {list(self.shape)}."
            )
        from llmrl.data.llm.encoding import Encoding

        encoding, chats = Encoding.of(options), self.to_chats()
        return encoding.encode(chats) if self.ndim == 2 else encoding.encode([chats])[0]

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,)) -> Composite:
        """The spec of a History of this shape: strings and other Python objects, which have no dtype.

        >>> History.default_spec((2, 3)).shape
        torch.Size([2, 3])
        """
        return Composite({name: NonTensor(shape=tuple(shape)) for name in FIELDS}, shape=tuple(shape), data_cls=cls)

    def _repr_html_(self) -> str:
        from llmrl.notebook_html import conversation_html, visible

        chats = {0: [[self._nested]], 1: [self._nested]}.get(self.ndim, self._nested)
        if self.ndim > 2:
            return f"<pre>{html.escape(visible(repr(self)))}</pre>"
        shown = [
            conversation_html(f"conversation {n}", map(_message_html, chat)) for n, chat in enumerate(chats[:_SHOWN])
        ]
        more = f"<p>{len(chats) - _SHOWN} more conversations</p>" if len(chats) > _SHOWN else ""
        return f"<p>{html.escape(f'History {list(self.shape)}')}</p>{''.join(shown)}{more}"

    # The tensorclass over nested lists

    def __getitem__(self, index: Any) -> History:
        found = _index_rows(self._nested, index, self.ndim)
        if found is None:  # an index that lists do not support, such as None or a mask of two dimensions
            return rewrap(self, inner(self)[index])
        return type(self)._of(*found)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            object.__setattr__(self, name, value)
            return
        columns = {field: getattr(self, field) for field in FIELDS} | {name: value}
        fill(self, stack_messages(_zip_fields(columns, self.ndim), self.ndim))

    @classmethod
    def _of(cls, nested: Any, ndim: int) -> History:
        """A History over nested lists of messages, which are not copied."""
        self = cls.__new__(cls)
        fill(self, stack_messages(nested, ndim))
        return self

    @property
    def _nested(self) -> Any:
        """Nested lists of the messages themselves, not copies: do not change them."""
        return unstack_messages(inner(self))

    def _depth(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise ShapeError(f"History: dim must be in [{-self.ndim}, {self.ndim}): got {dim}.")
        return dim % self.ndim

    def _grown(self, new: Any, depth: int, method: str, inplace: bool) -> History:
        nested = _join(self._nested, new, depth, method)
        if not inplace:
            return type(self)._of(nested, self.ndim)
        if inner(self).is_locked:
            raise RuntimeError(
                "History: a locked history must not be changed in place; unlock_() it, or pass inplace=False."
            )
        fill(self, stack_messages(nested, self.ndim))
        return self


def _init(
    self: History,
    role: Any,
    content: Any = None,
    is_complete: Any = True,
    tool_calls: Any = None,
    tool_responses: Any = None,
    extra: Any = None,
    *,
    batch_size: Sequence[int] | int | None = None,
    device: Any = None,
    names: Sequence[str] | None = None,
) -> None:
    """A message, a conversation or a batch, by the nesting of ``role``; the shape is read from it.

    ``batch_size`` is checked against it, ``device`` is accepted and ignored, ``names`` must be None.
    """
    if names is not None:
        raise ConfigError(f"History: its dimensions have no names: got names={names!r}.")
    ndim = 0
    probe = role
    while isinstance(probe, (list, tuple)):
        ndim, probe = ndim + 1, probe[0] if probe else ""
    # Only ``role`` defines the nesting: contents and calls may be lists themselves.
    columns = dict(zip(FIELDS, (role, content, is_complete, tool_calls, tool_responses, extra), strict=True))
    fill(self, stack_messages(_zip_fields(columns, ndim), ndim))
    if batch_size is not None:
        expected = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
        if expected != self.batch_size:
            raise ShapeError(
                f"History: batch_size must be the nesting of role: got {list(expected)} for {list(self.batch_size)}."
            )


def _repr(self: History) -> str:
    return f"History({list(self.shape)}, {_SHORT.repr(self._nested)})"


_SHORT = Repr()
_SHORT.maxstring, _SHORT.maxdict = 60, 8


def _message_html(message: Message) -> str:
    from llmrl.notebook_html import message_html

    content = message.get("content")
    if not isinstance(content, str):
        from llmrl.data.llm.content import plain_content

        content = "" if content is None else json.dumps(plain_content(content), ensure_ascii=False, default=str)
    if message.get("tool_calls"):
        content += f"\ntool calls: {json.dumps(message['tool_calls'], ensure_ascii=False, default=str)}"
    note = "" if message.get("is_complete", True) else "(unfinished)"
    return message_html(str(message["role"]), content, note=note)


def _column(self: History, name: str) -> Any:
    return _pick_field(self._nested, self.ndim, name)


def _parsed(row: ChatTemplate, text: str) -> Any:
    if not isinstance(text, str):
        raise DataError(f"History.from_text: must be given text: got {type(text).__name__}.")
    try:
        messages = row.parse(text)
    except Exception as error:  # a user's parser may raise anything
        raise TemplateError(
            f"History.from_text: the parser of template {row.name!r} must read the text: got {type(error).__name__} "
            f"({error}) for {text[:80]!r}."
        ) from error
    if isinstance(messages, History):
        messages = messages._nested
    if not messages:
        raise TemplateError(f"History.from_text: text must hold a message of template {row.name!r}: got {text[:80]!r}.")
    return messages


def _check_history(history: Any, method: str) -> None:
    if not isinstance(history, History):
        raise TypeError(
            f"History.{method}: must be given a History: got {type(history).__name__}; History(role=..., content=...) "
            "is one message, History.from_messages([...]) a conversation."
        )


# --- nested lists of messages: indexed, joined and taken apart as a tensor's rows are; ndim counts their levels -------


def _copy_messages(chat: Iterable[Message], who: str) -> list[Message]:
    """Copies of one conversation's messages. Raises DataError naming an entry that is not a message."""
    messages = list(chat)
    # Comparing the type first is faster.
    copies = [dict(m) for m in messages if (type(m) is dict or isinstance(m, Mapping)) and "role" in m]
    if len(copies) < len(messages):
        wrong = next(m for m in messages if not isinstance(m, Mapping) or "role" not in m)
        got = f"the keys {list(wrong)}" if isinstance(wrong, Mapping) else f"{wrong!r:.60}"
        raise DataError(f"{who}: a conversation must be a list of dicts with 'role' and 'content': got {got} in it.")
    return copies


def _pick_field(nested: Any, ndim: int, name: str) -> Any:
    if ndim:
        return [_pick_field(row, ndim - 1, name) for row in nested]
    return split_message(nested)[name] if name in ("is_complete", "extra") else nested.get(name)


def _zip_fields(columns: dict[str, Any], ndim: int) -> Any:
    """The inverse of `_pick_field`, for all fields. A column that is not a list applies to every message."""
    if not ndim:
        return join_message(columns)
    length = len(columns["role"])
    lists = {name: value for name, value in columns.items() if isinstance(value, (list, tuple))}
    for name, value in lists.items():
        if len(value) != length:
            raise ShapeError(f"History: {name} must have one entry for each of {length} roles: got {len(value)}.")
    return [
        _zip_fields({name: value[row] if name in lists else value for name, value in columns.items()}, ndim - 1)
        for row in range(length)
    ]


def _nested_chats(nested: Any, ndim: int) -> list[Any]:
    """Copies in the chat format of the Transformers library, without padding messages."""
    if ndim > 1:
        return [_nested_chats(row, ndim - 1) for row in nested]
    chat = [dict(message) for message in nested if message["role"] != _PADDING_ROLE]
    for message in chat:
        message.pop("is_complete", None)
        content = message.get("content")
        if content is not None and type(content) is not str:
            from llmrl.data.llm.content import plain_content

            message["content"] = plain_content(content)
    return chat


def _wrap(nested: Any, depth: int) -> Any:
    """Nested lists with a new dimension of size one at ``depth``."""
    return [nested] if depth == 0 else [_wrap(row, depth - 1) for row in nested]


def _join(nested: Any, new: Any, depth: int, method: str) -> Any:
    """Nested lists joined at ``depth``; the levels above it must agree in length."""
    if depth == 0:
        return [*nested, *new]
    if len(nested) != len(new):
        raise GrowthError(
            f"History.{method}: the new history must have a row for each of {len(nested)} conversations: got "
            f"{len(new)}."
        )
    return [_join(row, new_row, depth - 1, method) for row, new_row in zip(nested, new, strict=True)]


def _index_rows(nested: Any, index: Any, ndim: int) -> tuple[Any, int] | None:
    """Indexes nested lists as tensors are indexed: (result, its ndim), or None for what only tensors support."""
    parts = list(index) if isinstance(index, tuple) else [index]
    spots = [spot for spot, part in enumerate(parts) if part is Ellipsis]
    if len(spots) > 1 or len(parts) - len(spots) > ndim:
        return None
    for spot in spots:
        parts[spot : spot + 1] = [slice(None)] * (ndim - len(parts) + 1)
    picks = []
    for spot, part in enumerate(parts):
        if not isinstance(part, (int, slice)) and part is not None:  # numbers or a mask: a list, a tensor or an array
            part = parts[spot] = part.tolist() if hasattr(part, "tolist") else list(part)
        if isinstance(part, list):
            picks.append(part)
        elif part is None or isinstance(part, bool):  # either adds a dimension
            return None
    # Tensors pair the entries of two lists instead of taking rows and columns.
    if len(picks) > 1 or (picks and any(isinstance(pick, list) for pick in picks[0])):
        return None
    return _take_rows(nested, parts), ndim - sum(isinstance(part, int) for part in parts)


def _take_rows(nested: Any, parts: list[Any]) -> Any:
    if not parts:
        return nested
    first, *rest = parts
    if isinstance(first, int):
        return _take_rows(nested[first], rest)
    if isinstance(first, slice):
        rows = nested[first]
    elif not first or not isinstance(first[0], bool):
        rows = [nested[pick] for pick in first]
    elif len(first) == len(nested):
        rows = [row for row, keep in zip(nested, first, strict=True) if keep]
    else:
        raise ShapeError(f"History: a mask must have an entry for each of {len(nested)} rows: got {len(first)}.")
    return [_take_rows(row, rest) for row in rows] if rest else rows


# These replace the methods that a tensorclass generates: ``__init__`` and fields are faster over the lists, and the
# generated ``__repr__`` fails if the first conversation of a batch is empty.
_init.__qualname__ = "History.__init__"  # shown in Python's own errors
History.__init__ = _init
History.__repr__ = _repr
for _name in FIELDS:
    setattr(History, _name, property(partial(_column, name=_name)))
