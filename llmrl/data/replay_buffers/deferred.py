"""A lazy stack whose rows are built when somebody first looks at one. What a row is built from is ``layout.py``'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase


class DeferredStack(LazyStackedTensorDict):
    """A ``LazyStackedTensorDict`` over dimension 0: most batches are trained on without a look at their conversations.

    ``build`` returns the rows, and is picklable. From the first look on, this is an ordinary lazy stack.
    """

    _build: Callable[[], list[TensorDictBase]] | None = None

    @classmethod
    def of(cls, build: Callable[[], list[TensorDictBase]], batch_size: torch.Size) -> Self:
        self = cls.__new__(cls)
        self._is_locked = None
        self.stack_dim = 0
        self.hook_out = self.hook_in = None
        self._batch_size = batch_size
        self._build = build
        return self

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        if self._build is not None:
            self._rows, self._build = self._build(), None
        return self._rows

    @tensordicts.setter
    def tensordicts(self, rows: list[Any]) -> None:
        self._rows, self._build = rows, None
