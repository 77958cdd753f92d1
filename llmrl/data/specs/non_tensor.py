"""`NonTensor`: an entry that is not a tensor, such as a text. It knows a shape and an example, and cannot check much
more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Size

from llmrl.data.specs.base import LeafSpec, Mismatch, fits

__all__ = ["NonTensor"]


class NonTensor(LeafSpec):
    """Any Python object per entry, a container of the right batch size included; with ``example_data``, one of its
    type, or None.

    Returns (`rand`, `zero`, `one`) the example, as one NonTensorData of the asked shape (no cost per row), or with
            ``batched`` as a NonTensorStack whose rows share it

    >>> spec = NonTensor(shape=(2,), example_data="a text")
    >>> spec.rand(), spec.is_in(NonTensorData(3, batch_size=[2]))
    (NonTensorData(data=a text, batch_size=torch.Size([2]), device=cpu), False)
    """

    def __init__(
        self,
        shape: Sequence[int] | int = (1,),
        *,
        device: torch.device | str | int | None = None,
        example_data: Any = None,
        batched: bool = False,
    ):
        super().__init__(shape, device, None)
        self.example_data = example_data
        self.batched = batched

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        return self._example(self._full_shape(shape))

    def zero(self, shape: Sequence[int] = ()) -> Any:
        return self._example(self._full_shape(shape))

    def one(self, shape: Sequence[int] = ()) -> Any:
        return self._example(self._full_shape(shape))

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        if is_tensor_collection(value):
            if not fits(value.batch_size, self.shape):
                yield Mismatch(key, "shape", f"declared shape {tuple(self.shape)}, got {tuple(value.batch_size)}")
            entries = _entries(value) if is_non_tensor(value) else [value]
        elif self.shape or isinstance(value, torch.Tensor):
            yield Mismatch(key, "type", f"declared non-tensor data, got {type(value).__name__}")
            return
        else:
            entries = [value]
        if self.example_data is None:
            return
        kind = type(self.example_data)
        for entry in entries:
            if entry is not None and not isinstance(entry, kind):
                yield Mismatch(key, "type", f"declared {kind.__name__} entries, got {type(entry).__name__}")
                return

    def project(self, value: Any) -> Any:
        return value

    def encode(self, value: Any) -> Any:
        """``value`` as NonTensorData, or as a NonTensorStack where it is a list and the spec has dims."""
        if is_non_tensor(value):
            return value
        if isinstance(value, list) and self.shape:
            return NonTensorStack(*value)
        return NonTensorData(value, batch_size=self._full_shape(()))

    def to_numpy(self, value: Any) -> Any:
        """The Python objects themselves: one, or a list of them (of lists, for more dims)."""
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if is_non_tensor(value) else value

    def to(self, dest: torch.device | str | int | torch.dtype) -> NonTensor:
        return self.clone() if isinstance(dest, torch.dtype) else super().to(dest)

    def _example(self, shape: Size) -> Any:
        if self.batched and shape:
            row = self._example(shape[1:])
            return NonTensorStack(*[row] * shape[0])
        return NonTensorData(self.example_data, batch_size=shape, device=self.device)

    def _domain_text(self) -> str:
        return "" if self.example_data is None else f"example_data={self.example_data!r}"

    def _identity(self) -> tuple[object, ...]:
        return (*super()._identity(), self.batched, self.example_data)


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, NonTensorStack):
        return [value.data]
    entries: list[Any] = []
    pending = value.tolist()
    while pending:
        entry = pending.pop()
        if isinstance(entry, list):
            pending.extend(entry)
        else:
            entries.append(entry)
    return entries
