"""Rows that know where they were read, and the rows of Arrow tables without the nulls that Arrow adds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from llmrl.data.llm.row_messages import is_message
from llmrl.errors import TemplateError

_KEPT_NULLS = ("default", "const", "enum")  # of a schema: null is a value there


class PlacedRow(dict[str, Any]):
    """A row of a file; ``place`` names it in messages, such as ``chats.jsonl:3``."""

    __slots__ = ("place",)
    place: str

    @classmethod
    def at(cls, place: str, row: Mapping[str, Any]) -> PlacedRow:
        placed = cls(row)
        placed.place = place
        return placed


class ArrowRows(Sequence[PlacedRow]):
    """The rows of a ``datasets.Dataset``, read as they are asked for."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> PlacedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PlacedRow]: ...
    def __getitem__(self, index: int | slice) -> PlacedRow | list[PlacedRow]:
        if isinstance(index, slice):
            return list(self._rows(range(len(self))[index]))
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows: got row {index}.")
        return arrow_row(self.dataset[index], f"{self.name}, row {index % len(self) + 1}")

    def __iter__(self) -> Iterator[PlacedRow]:
        for start in range(0, len(self), 1024):
            yield from self[start : start + 1024]

    def _rows(self, numbers: range) -> Iterator[PlacedRow]:
        columns = self.dataset[list(numbers)] if numbers else {}
        for place, values in enumerate(zip(*columns.values(), strict=True)):
            row = dict(zip(columns, values, strict=True))
            yield arrow_row(row, f"{self.name}, row {numbers[place] + 1}")


def arrow_row(row: Mapping[str, Any], place: str) -> PlacedRow:
    """A row of Arrow, without the nulls in its messages, calls and schemas: Arrow gives the objects of a column the
    union of their fields. In schemas, ``default``, ``const`` and ``enum`` stay as they are.

    >>> arrow_row({"messages": [{"role": "user", "content": "Hi", "tool_calls": None}], "answer": None}, "row 1")
    {'messages': [{'role': 'user', 'content': 'Hi'}], 'answer': None}
    """
    return PlacedRow.at(place, {name: _value(name, value) for name, value in row.items()})


def _value(name: str, value: Any) -> Any:
    if name in ("tools", "functions"):
        return _without_nulls(value, _KEPT_NULLS)
    if is_message(value) or (isinstance(value, list) and value and all(map(is_message, value))):
        return _without_nulls(value)
    return value


def _without_nulls(value: Any, kept: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner, kept) for key, inner in value.items() if inner is not None or key in kept}
    return [_without_nulls(inner, kept) for inner in value] if isinstance(value, (list, tuple)) else value


def name_refused(
    error: TemplateError, chats: Sequence[Any], places: Sequence[str], render: Callable[[Sequence[Any]], Any]
) -> TemplateError:
    """The error of a batch of conversations, with the place of the first refused one and its message from 1 on."""
    low, high = 0, len(chats)
    while high - low > 1:  # the first conversation that is refused alone is within [low, high)
        middle = (low + high) // 2
        try:
            render(chats[low:middle])
            low = middle
        except TemplateError as other:
            high, error = middle, other
    try:
        render(chats[low:high])
    except TemplateError as other:
        error = other
    place = places[low] if places else "no row"
    text = re.sub(r"message (\d+)", lambda found: f"message {int(found[1]) + 1}", str(error))
    numbers = re.findall(r"message (\d+)", text)
    text = re.sub(r"( of)? conversation 0\b|conversation 0, ", "", text)
    return TemplateError(f"{place}{f', message {numbers[0]}' if numbers else ''}: {text}")
