"""`Choice`: the spec of a value that belongs to one of several specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Size, Tensor

from llmrl.data.specs.base import Mismatch, TensorSpec, listing
from llmrl.errors import ConfigError


class Choice(TensorSpec):
    """A value that belongs, as a whole, to one of ``choices``: specs of the same shape, dtype and device. With extra
    leading dims, each row is a separate value. `rand` draws a spec, then a value from it; `zero` and `one` use the
    first spec, `encode` the first spec that accepts its argument.

    Raises  ConfigError if there are no choices, or if their shapes, dtypes or devices differ

    >>> from llmrl.data.specs import Bounded
    >>> spec = Choice([Bounded(0, 1), Bounded(5, 6)])
    >>> spec.is_in(torch.tensor(5.5)), spec.is_in(torch.tensor(3.0)), spec.project(torch.tensor(4.0))
    (True, False, tensor(5.))
    """

    def __init__(self, choices: Sequence[TensorSpec]):
        self.choices = tuple(choices)
        if wrong := [choice for choice in self.choices if not isinstance(choice, TensorSpec)]:
            raise ConfigError(f"Choice: choices must be specs: got {wrong[0]!r}, a {type(wrong[0]).__name__}.")
        kinds = {str((tuple(spec.shape), spec.dtype, spec.device)) for spec in self.choices}
        if len(kinds) != 1:
            raise ConfigError(
                "Choice: needs at least one spec, all of one shape, dtype and device: got "
                f"{', '.join(sorted(kinds)) or 'none'}."
            )
        first = self.choices[0]
        self.shape, self.dtype, self._kept = first.shape, first.dtype, max(spec._kept for spec in self.choices)

    @property
    def device(self) -> torch.device | None:
        return self.choices[0].device

    @property
    def domain(self) -> Any:
        return self.choices[0].domain

    def _rand(self, shape: Size, generator: torch.Generator | None) -> Any:
        if shape:  # row by row, because each row draws its own spec
            rows = [self.rand(generator=generator) for _ in range(shape.numel())]
            return torch.stack(rows).reshape((*shape, *rows[0].shape)) if rows else self.zero(shape)
        device = None if generator is None else generator.device
        drawn = int(torch.randint(len(self.choices), (), generator=generator, device=device))
        return self.choices[drawn].rand(generator=generator)

    def _filled(self, number: int, shape: Size) -> Any:
        return self.choices[0]._filled(number, shape)

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        found = [list(spec.mismatches(value, key)) for spec in self.choices]
        if not all(found):
            return
        if any(mismatch.kind != "domain" for mismatch in found[0]) or value.ndim <= self.ndim:
            yield from min(found, key=len)  # the mismatches of the closest choice
            return
        for row in value.unbind(0):  # each row may belong to a different choice
            yield from self.mismatches(row, key)

    def project(self, value: Any) -> Any:
        """The nearest value in any of the choices; for values that are not tensors, that of the first choice."""
        if self.is_in(value):
            return value
        if value.ndim > self.ndim:
            return torch.stack([self.project(row) for row in value.unbind(0)])
        projected = [spec.project(value) for spec in self.choices]
        if not isinstance(value, Tensor):
            return projected[0]
        return min(projected, key=lambda each: float((each.double() - value.double()).square().sum()))

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        for spec in self.choices[:-1]:
            try:
                return spec.encode(value, ignore_device=ignore_device)
            except (ValueError, KeyError):
                continue
        return self.choices[-1].encode(value, ignore_device=ignore_device)

    def _to_numpy(self, value: Any) -> Any:
        return next((spec for spec in self.choices if spec.is_in(value)), self.choices[0]).to_numpy(value)

    def _count(self, use_mask: bool) -> int | float:
        # Choices may overlap, so distinct values can only be counted by listing them.
        if len(self.choices) == 1 or any(spec._count(use_mask) == math.inf for spec in self.choices):
            return max(spec._count(use_mask) for spec in self.choices)
        return len(self._enumerate(use_mask))

    def _enumerate(self, use_mask: bool) -> Any:
        # A value that several choices share is listed once.
        parts = []
        for number, spec in enumerate(self.choices):
            values = spec.enumerate(use_mask)
            new = [row for row in range(len(values)) if not any(s.is_in(values[row]) for s in self.choices[:number])]
            parts.append(values[torch.tensor(new, dtype=torch.int64)])
        return torch.cat(parts)

    def _map(self, change: Callable[[TensorSpec], TensorSpec]) -> Self:
        return type(self)([change(spec) for spec in self.choices])

    def _children(self) -> Sequence[TensorSpec]:
        return self.choices

    def _identity(self) -> tuple[Any, ...]:
        return self.choices

    def __repr__(self) -> str:
        return listing(self, (repr(spec) for spec in self.choices), f"shape={tuple(self.shape)}")
