"""`Lockable`: a spec that refuses writes while it is locked, as a whole or as a part of another one."""

from __future__ import annotations

import weakref
from typing import Any, Self

from tensordict import NestedKey

from llmrl.data.specs.base import TensorSpec

__all__ = ["Lockable"]


class Lockable(TensorSpec):
    """A spec of named entries that can be locked. Values derived from its keys are cached meanwhile."""

    is_locked = False
    _leaf_keys: tuple[NestedKey, ...] | None = None
    _holders: tuple[weakref.ref[Lockable], ...] = ()
    """The specs that it was locked as a part of."""

    @property
    def leaf_keys(self) -> tuple[NestedKey, ...]:
        """The keys of all leaves, nested ones included; kept while the spec is locked with all that it holds."""
        return tuple(self.keys(True, True)) if self._leaf_keys is None else self._leaf_keys

    def lock_(self, recurse: bool = True) -> Self:
        """Refuses writes from now on, also in nested ones if ``recurse``. Returns self."""
        for part in self._parts(recurse):
            part.is_locked = True
            part._leaf_keys = tuple(part.keys(True, True)) if recurse else None
            for child in part._locked_along(recurse):
                others = [ref for ref in child._holders if (holder := ref()) is not None and holder is not part]
                child._holders = (*others, weakref.ref(part))
        return self

    def unlock_(self, recurse: bool = True) -> Self:
        """Allows writes again, also in nested ones if ``recurse``. Returns self.

        Raises  RuntimeError for a part of another spec that is locked, which would go on answering for it
        """
        parts = self._parts(recurse)
        for part in parts:
            holders = [holder for ref in part._holders if (holder := ref()) is not None and holder.is_locked]
            if not all(any(holder is other for other in parts) for holder in holders):
                raise RuntimeError("Composite: cannot unlock a part of a locked spec; unlock_() the whole of it.")
        for part in parts:
            part.is_locked, part._leaf_keys = False, None
        return self

    def _locked_along(self, recurse: bool) -> list[Lockable]:
        """The specs that are locked and unlocked with this one."""
        return [spec for spec in self._children() if recurse and isinstance(spec, Lockable)]

    def _parts(self, recurse: bool) -> list[Lockable]:
        return [self, *(part for child in self._locked_along(recurse) for part in child._parts(recurse))]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_holders": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.is_locked:  # holds the copies of what it held
            self.lock_(recurse=self._leaf_keys is not None)

    def _assert_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError("Composite: cannot write to a locked spec; change a clone(), or unlock_() it.")
