"""The entries of a `Composite`: its keys, and the flat mapping behind its ``keys()``, ``values()`` and ``items()``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey

if TYPE_CHECKING:
    from llmrl.data.specs.base import TensorSpec
    from llmrl.data.specs.composite import Composite

__all__ = ["MISSING", "Entries", "is_key", "path_of"]

MISSING: Any = object()


class Entries(Mapping[NestedKey, "TensorSpec | None"]):
    """The entries of a composite, with those of nested ones under tuples if ``include_nested``."""

    def __init__(self, spec: Composite, include_nested: bool, leaves_only: bool):
        self._spec, self._nested, self._leaves = spec, include_nested, leaves_only

    def __getitem__(self, key: NestedKey) -> TensorSpec | None:
        there = is_key(key) and (self._nested or len(path_of(key)) == 1)
        found = self._spec.get(key, MISSING) if there else MISSING
        if found is MISSING or (self._leaves and _is_nested(found)):
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[NestedKey]:
        for name in self._spec._entry_names():
            entry = self._spec._entry(name)
            nested = _is_nested(entry)
            if not (nested and self._leaves):
                yield name
            if nested and self._nested:
                yield from ((name, *path_of(below)) for below in Entries(entry, True, self._leaves))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_nested(entry: Any) -> bool:
    return hasattr(entry, "_entry_names")


def is_key(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, tuple) and bool(item) and all(isinstance(i, str) for i in item))


def path_of(key: NestedKey) -> tuple[str, ...]:
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key or not all(isinstance(part, str) for part in key):
        raise TypeError(f"Composite: a key is a string or a tuple of strings: got {key!r}.")
    return key
