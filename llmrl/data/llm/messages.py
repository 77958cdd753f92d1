"""Messages, and nested lists of them that are indexed, joined and taken apart as a tensor's rows are.

``ndim`` counts the levels of nesting; the innermost level lists messages. `History` is a tensorclass over such lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from llmrl.data.llm.content import plain_content
from llmrl.data.llm.templates import Message
from llmrl.data.ragged.stack import join_message, split_message
from llmrl.errors import DataError, ShapeError

__all__ = ["GrowthError", "copy_messages", "index_rows", "join", "pick_field", "to_chats", "wrap", "zip_fields"]

_PADDING_ROLE = "<none>"  # a message of this role only fills a dense batch; it is never rendered


class GrowthError(ShapeError, RuntimeError):
    """A history cannot take these messages: they have another shape, or it has no dimension to grow along."""


def copy_messages(chat: Iterable[Message], who: str) -> list[Message]:
    """Copies of one conversation's messages. Raises DataError naming an entry that is not a message."""
    messages = list(chat)
    for message in messages:
        if not isinstance(message, (dict, Mapping)) or "role" not in message:  # dict first: the check is quicker
            got = f"the keys {list(message)}" if isinstance(message, Mapping) else f"{message!r:.60}"
            raise DataError(
                f"{who}: a conversation must be a list of dicts with 'role' and 'content': got {got} in it."
            )
    return [dict(message) for message in messages]


def pick_field(nested: Any, ndim: int, name: str) -> Any:
    """One field of every message, as nested lists."""
    if ndim:
        return [pick_field(row, ndim - 1, name) for row in nested]
    return split_message(nested)[name] if name in ("is_complete", "extra") else nested.get(name)


def zip_fields(columns: dict[str, Any], ndim: int) -> Any:
    """The inverse of `pick_field`, of all fields at once. A column that is not a list holds for every message."""
    if not ndim:
        return join_message(columns)
    length = len(columns["role"])
    lists = {name: value for name, value in columns.items() if isinstance(value, (list, tuple))}
    for name, value in lists.items():
        if len(value) != length:
            raise ShapeError(f"History: {name} must have one entry for each of {length} roles: got {len(value)}.")
    return [
        zip_fields({name: value[row] if name in lists else value for name, value in columns.items()}, ndim - 1)
        for row in range(length)
    ]


def to_chats(nested: Any, ndim: int) -> list[Any]:
    """Copies in the chat format of the Transformers library, without padding messages."""
    if ndim > 1:
        return [to_chats(row, ndim - 1) for row in nested]
    chat = [dict(message) for message in nested if message["role"] != _PADDING_ROLE]
    for message in chat:
        message.pop("is_complete", None)
        content = message.get("content")
        if content is not None and type(content) is not str:
            message["content"] = plain_content(content)
    return chat


def wrap(nested: Any, depth: int) -> Any:
    """Nested lists with a new dimension of size one at ``depth``."""
    return [nested] if depth == 0 else [wrap(row, depth - 1) for row in nested]


def join(nested: Any, new: Any, depth: int, method: str) -> Any:
    """Nested lists joined at ``depth``; everything around it must agree in length."""
    if depth == 0:
        return [*nested, *new]
    if len(nested) != len(new):
        raise GrowthError(
            f"History.{method}: the new history must have a row for each of {len(nested)} conversations: got "
            f"{len(new)}."
        )
    return [join(row, new_row, depth - 1, method) for row, new_row in zip(nested, new, strict=True)]


def index_rows(nested: Any, index: Any, ndim: int) -> tuple[Any, int] | None:
    """Indexes nested lists as tensors are indexed; (result, its dimensions), or None for what only tensors can do."""
    index = index if isinstance(index, tuple) else (index,)
    spots = [spot for spot, part in enumerate(index) if part is Ellipsis]
    if len(spots) > 1 or len(index) - len(spots) > ndim:
        return None
    if spots:
        fill = (slice(None),) * (ndim - len(index) + 1)
        index = (*index[: spots[0]], *fill, *index[spots[0] + 1 :])
    if sum(not isinstance(part, (int, slice)) for part in index) > 1 or any(part is None for part in index):
        return None
    if not index:
        return nested, ndim
    first, rest = index[0], index[1:]
    if isinstance(first, torch.Tensor) and not first.ndim:
        first = first.item()
    if isinstance(first, bool):
        return None
    if isinstance(first, int):
        return index_rows(nested[first], rest, ndim - 1)
    rows = nested[first] if isinstance(first, slice) else _pick_rows(nested, first)
    if rows is None or not rest:
        return None if rows is None else (rows, ndim)
    found = [index_rows(row, rest, ndim - 1) for row in rows]
    if any(row is None for row in found):
        return None
    inner = found[0][1] if found else ndim - 1 - sum(isinstance(part, int) for part in rest)
    return [row[0] for row in found], inner + 1


def _pick_rows(nested: Any, index: Any) -> list[Any] | None:
    """The rows of a list or tensor of numbers, or of a mask; None for an index of several dimensions."""
    picks = index.tolist() if hasattr(index, "tolist") else list(index)
    if any(isinstance(pick, list) for pick in picks):
        return None
    if not picks or not isinstance(picks[0], bool):
        return [nested[pick] for pick in picks]
    if len(picks) != len(nested):
        raise ShapeError(f"History: a mask must have an entry for each of {len(nested)} rows: got {len(picks)}.")
    return [row for row, keep in zip(nested, picks, strict=True) if keep]
