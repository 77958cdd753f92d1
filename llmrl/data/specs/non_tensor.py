"""`NonTensor`: the spec of an entry that is not a tensor, such as a string."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Size

from llmrl.data.specs.base import Device, Mismatch, Shape, fits
from llmrl.data.specs.leaf import LeafSpec
from llmrl.errors import ConfigError


class NonTensor(LeafSpec):
    """Any Python object per entry, or a tensor collection of the right batch size. With ``example_data``, each entry
    must be of its type, or None.

    Returns (`rand`, `zero`, `one`) the example as one NonTensorData of the requested shape (no cost per row); with
            ``batched`` as a NonTensorStack whose rows share it; with ``feature_dims`` as a NonTensorStack over all dims
            but the last ``feature_dims``

    >>> spec = NonTensor(shape=(2,), example_data="a text")
    >>> spec.rand(), spec.is_in(NonTensorData(3, batch_size=[2]))
    (NonTensorData(data=a text, batch_size=torch.Size([2]), device=cpu), False)
    """

    def __init__(
        self,
        shape: Shape = (1,),
        device: Device = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        batched: bool = False,
        feature_dims: int | None = None,
    ):
        super().__init__((1,) if shape is None else shape, device, dtype)
        if feature_dims is not None and (batched or not 0 <= feature_dims <= len(self.shape)):
            raise ConfigError(
                f"NonTensor: feature_dims must be at most the number of dims, and needs batched=False: got "
                f"{feature_dims}, shape {tuple(self.shape)}, batched={batched}."
            )
        self.example_data = example_data
        self.batched = batched
        self._feature_dims = feature_dims

    @property
    def feature_dims(self) -> int:
        """The number of last dims that a single NonTensorData covers; by default all."""
        return len(self.shape) if self._feature_dims is None else self._feature_dims

    def _rand(self, shape: Size, generator: torch.Generator | None) -> Any:
        return self._example(self._full_shape(shape))

    def _filled(self, number: int, shape: Size) -> Any:
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

    def _encode(self, value: Any) -> Any:
        """``value`` as NonTensorData, or as a NonTensorStack if it is a list and the spec has dims."""
        return value if is_non_tensor(value) else self._rows(value, self.shape)

    def _to_numpy(self, value: Any) -> Any:
        """The Python objects themselves: one, or a list of them (of lists, for more dims)."""
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if is_non_tensor(value) else value

    def _to(self, dest: torch.device | str | int | torch.dtype) -> NonTensor:
        return self.clone() if isinstance(dest, torch.dtype) else super()._to(dest)

    def _example(self, shape: Size) -> Any:
        features = self._feature_dims if self._feature_dims is not None else 0 if self.batched else len(shape)
        if len(shape) > features:  # repeats one row object: building every row would be slow
            return NonTensorStack(*[self._example(shape[1:])] * shape[0])
        return NonTensorData(self.example_data, batch_size=shape, device=self.device)

    def _rows(self, value: Any, shape: Size) -> Any:
        if isinstance(value, list) and shape:  # lists nested deeper than the spec has dims are entries
            return NonTensorStack(*[self._rows(row, shape[1:]) for row in value])
        return NonTensorData(value, batch_size=self._full_shape(())[len(self.shape) - len(shape) :])

    def _domain_text(self) -> str:
        return "" if self.example_data is None else f"example_data={self.example_data!r}"

    def _identity(self) -> tuple[object, ...]:
        return (*super()._identity(), self.batched, self._feature_dims, self.example_data)


def _entries(value: Any) -> list[Any]:
    # Follows the nesting of the stack, because an entry may itself be a list.
    if not isinstance(value, NonTensorStack):
        return [value.data]
    return [entry for row in value.tensordicts for entry in _entries(row)]
