"""`NamedSpec`: keys, views and lock of a spec with named entries; subclasses decide how to store them."""

from __future__ import annotations

import abc
import weakref
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import chain
from typing import Any, Self

from tensordict import NestedKey

from llmrl.data.specs.base import TensorSpec

MISSING: Any = object()


class NamedSpec(TensorSpec):
    """A spec of named entries. It rejects writes while it is locked, on its own or as part of another spec."""

    is_locked = False
    _leaf_keys: tuple[NestedKey, ...] | None = None
    _holders: tuple[weakref.ref[NamedSpec], ...] = ()
    """The specs whose `lock_` also locked this one."""

    @abc.abstractmethod
    def _entry(self, name: str) -> Any:
        """The entry called ``name``, or MISSING."""

    @abc.abstractmethod
    def _entry_names(self) -> Sequence[str]: ...

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The entry, or ``default``."""
        first, *rest = path_of(key)
        found = self._entry(first)
        if rest and found is not MISSING:
            found = found.get(tuple(rest), MISSING) if isinstance(found, NamedSpec) else MISSING
        return default if found is MISSING else found

    def __contains__(self, item: Any) -> bool:
        """True if ``item`` is a key of an entry, or a value that `is_in`."""
        return self.get(item, MISSING) is not MISSING if is_key(item) else self.is_in(item)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[NestedKey]:
        return _Entries(self, include_nested, leaves_only).keys()

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> ValuesView[TensorSpec | None]:
        return _Entries(self, include_nested, leaves_only).values()

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> ItemsView[NestedKey, TensorSpec | None]:
        return _Entries(self, include_nested, leaves_only).items()

    def __iter__(self) -> Iterator[NestedKey]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entry_names())

    @property
    def leaf_keys(self) -> tuple[NestedKey, ...]:
        """The keys of all leaves, nested ones included; cached while the spec is locked recursively."""
        return tuple(self.keys(True, True)) if self._leaf_keys is None else self._leaf_keys

    def lock_(self, recurse: bool = True) -> Self:
        """Makes the spec read-only; with ``recurse``, nested specs too. Returns self."""
        for part in self._parts(recurse):
            part.is_locked = True
            part._leaf_keys = tuple(part.keys(True, True)) if recurse else None  # otherwise nested keys can change
            for child in part._locked_along(recurse):
                # Weak references: a part can be unlocked once the spec that locked it has been deleted.
                others = [ref for ref in child._holders if (holder := ref()) is not None and holder is not part]
                child._holders = (*others, weakref.ref(part))
        return self

    def unlock_(self, recurse: bool = True) -> Self:
        """Makes the spec writable again; with ``recurse``, nested specs too. Returns self.

        Raises  RuntimeError for a part of another locked spec, whose cached `leaf_keys` could become wrong
        """
        parts = self._parts(recurse)
        for part in parts:  # check all before unlocking any
            holders = [holder for ref in part._holders if (holder := ref()) is not None and holder.is_locked]
            if not all(any(holder is other for other in parts) for holder in holders):
                raise RuntimeError("Composite: cannot unlock a part of a locked spec; unlock_() the whole spec.")
        for part in parts:
            part.is_locked, part._leaf_keys = False, None
        return self

    def _locked_along(self, recurse: bool) -> Sequence[NamedSpec]:
        """The nested specs that are locked and unlocked together with this one."""
        return [spec for spec in self._children() if recurse and isinstance(spec, NamedSpec)]

    def _parts(self, recurse: bool) -> list[NamedSpec]:
        return [self, *(part for child in self._locked_along(recurse) for part in child._parts(recurse))]

    def _assert_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError("Composite: cannot write to a locked spec; change a clone(), or unlock_() it.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_holders": ()}  # weak references cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.is_locked:  # sets _holders in the copies of its parts
            self.lock_(recurse=self._leaf_keys is not None)


class _Entries(Mapping[NestedKey, "TensorSpec | None"]):
    # The flat mapping behind keys(), values() and items(); nested entries, if included, have tuple keys.

    def __init__(self, spec: NamedSpec, include_nested: bool, leaves_only: bool):
        self._spec, self._nested, self._leaves = spec, include_nested, leaves_only

    def __getitem__(self, key: NestedKey) -> TensorSpec | None:
        there = is_key(key) and (self._nested or len(path_of(key)) == 1)
        found = self._spec.get(key, MISSING) if there else MISSING
        if found is MISSING or (self._leaves and isinstance(found, NamedSpec)):
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[NestedKey]:
        for name in self._spec._entry_names():
            # Skipped where not needed: a stack builds its entries on each access.
            entry = self._spec._entry(name) if self._nested or self._leaves else None
            is_named = isinstance(entry, NamedSpec)
            if not (is_named and self._leaves):
                yield name
            if is_named and self._nested:
                yield from ((name, *path_of(key)) for key in entry.keys(True, self._leaves))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_key(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, tuple) and bool(item) and all(map(is_key, item)))


def path_of(key: NestedKey) -> tuple[str, ...]:
    """The names along ``key``; ``("a", ("b",))`` is ``("a", "b")``."""
    if isinstance(key, str):
        return (key,)
    if not is_key(key):
        raise TypeError(f"Composite: a key must be a string or a tuple of strings: got {key!r}.")
    return key if all(isinstance(part, str) for part in key) else tuple(chain.from_iterable(map(path_of, key)))
