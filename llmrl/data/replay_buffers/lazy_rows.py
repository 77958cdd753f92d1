"""A lazy stack that builds its rows on first access."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from tensordict.base import NO_DEFAULT
from torch import Tensor

from llmrl.data.ragged.stack import BorrowedRows
from llmrl.data.ted_utils import as_key


class DeferredStack(LazyStackedTensorDict):
    """A ``LazyStackedTensorDict`` over dimension 0: most batches are trained on without a look at their conversations.

    ``build`` returns the rows, and is picklable; ``ragged`` knows the rows of an entry without building them, for
    readers who pad. From the first look on, this is an ordinary lazy stack.
    """

    _build: Callable[[], list[TensorDictBase]] | None = None
    _ragged: Callable[[tuple[str, ...]], BorrowedRows | None] | None = None
    _later: frozenset[tuple[str, ...]] = frozenset()

    @classmethod
    def of(
        cls,
        build: Callable[[], list[TensorDictBase]],
        batch_size: torch.Size,
        ragged: Callable[[tuple[str, ...]], BorrowedRows | None] | None = None,
    ) -> Self:
        self = cls.__new__(cls)
        self._is_locked = None
        self.stack_dim = 0
        self.hook_out = self.hook_in = None
        self._batch_size = batch_size
        self._build = build
        self._ragged = ragged
        return self

    @torch.compiler.disable
    def get(self, key: NestedKey, default: Any = NO_DEFAULT, *args: Any, **kwargs: Any) -> Any:
        if self._build is not None and self._ragged is not None and kwargs.get("as_padded_tensor"):
            path = as_key(key)
            rows = None if path in self._later else self._ragged(path)
            if rows is not None and kwargs.keys() <= {"as_padded_tensor", "padding_value", "padding_side"}:
                return rows.padded(kwargs.get("padding_value", 0), kwargs.get("padding_side", "right"))
        return super().get(key, default, *args, **kwargs)

    def set_later(self, path: tuple[str, ...], value: Tensor) -> bool:
        """Sets an entry of the rows once they are built; False if they are already, or it would need a look at them."""
        if self._build is None or len(path) > 1 or value.shape[: len(self._batch_size)] != self._batch_size:
            return False
        self._build = partial(_with_entry, self._build, path[0], value)
        self._later |= {path}
        return True

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        return self._built()

    @torch.compiler.disable  # batches are built in different ways, on which compiled code must not depend
    def _built(self) -> list[TensorDictBase]:
        if self._build is not None:
            self._rows, self._build = self._build(), None
        return self._rows

    @tensordicts.setter
    def tensordicts(self, rows: list[Any]) -> None:
        self._rows, self._build = rows, None


def _with_entry(build: Callable[[], list[TensorDictBase]], name: str, value: Tensor) -> list[TensorDictBase]:
    rows = build()
    for row, part in zip(rows, value.unbind(0), strict=True):
        row.set(name, part)
    return rows
