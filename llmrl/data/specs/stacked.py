"""`torch.stack` of specs: one dense spec if they are equal, else a stack that keeps its members.

`Stacked` holds leaves, `StackedComposite` composites; `_Stack` is their common base. The functions at the end find
stacks in a tree of specs, compare the keys of their members and add missing ones. A shape operation is also applied to
the members' indices, as to a bound or a mask, which shows the member that each row of the result comes from.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection, lazy_stack
from torch import Size, Tensor

from llmrl.data.specs.base import Mismatch, TensorSpec, combinations, listing
from llmrl.data.specs.composite import Composite, assert_begins
from llmrl.data.specs.entries import MISSING, is_key
from llmrl.data.specs.shape import ShapeOp, full_index, index, lead_dim, repeat, select
from llmrl.errors import ConfigError, ShapeError


def stack(specs: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    """`torch.stack` of specs: a dense spec if they are equal, else a `Stacked` or `StackedComposite`.

    Raises  RuntimeError for specs of different types, dtypes, numbers of dims or devices

    >>> from llmrl.data.specs import Bounded
    >>> torch.stack([Bounded(0, 1), Bounded(0, 1)]).shape
    torch.Size([2])
    >>> torch.stack([Bounded(0, 1, (2,)), Bounded(0, 5, (3,))]).shape
    torch.Size([2, -1])
    """
    specs = tuple(specs)
    if not specs:
        raise RuntimeError("stack: needs at least one spec.")  # RuntimeError, like torch.stack
    first = specs[0]
    if all(spec is first or spec == first for spec in specs[1:]):
        return first._reshaped(repeat, dim, len(specs))
    return _kind(first)(*specs, dim=dim)


class _Stack(TensorSpec):
    # `members` are the specs along dim `stack_dim`; a dim whose size differs between them is -1.

    members: tuple[Any, ...]
    stack_dim: int

    def __init__(self, *specs: TensorSpec, dim: int = 0):
        if not specs:
            raise ConfigError(f"{type(self).__name__}: needs at least one spec.")
        self.members = specs
        kinds = {_leaf_kind(spec) for spec in specs}
        if len(kinds) > 1 or isinstance(specs[0], Composite) != isinstance(self, Composite):
            raise RuntimeError(f"{type(self).__name__}: Found more than one type of specs: {', '.join(sorted(kinds))}.")
        devices = [spec.device for spec in specs]
        for what, found in (
            ("Dtypes", [spec.dtype for spec in specs]),
            ("Ndims", [spec.ndim for spec in specs]),
            ("Devices", [device for device in devices if device is not None]),
        ):
            if any(one != found[0] for one in found):
                raise RuntimeError(f"{type(self).__name__}: {what} differ between the specs: got {found}.")
        self._kept = specs[0]._kept
        self.stack_dim = lead_dim(dim, Size((*specs[0].shape, 1)), self._kept, f"stack along dim {dim}")

    @property
    def shape(self) -> Size:  # type: ignore[override]
        """The members' shape, -1 where they differ, with the number of members inserted at ``stack_dim``."""
        sizes = [
            first if all(size == first for size in rest) else -1
            for first, *rest in zip(*(spec.shape for spec in self.members), strict=True)
        ]
        return Size((*sizes[: self.stack_dim], len(self.members), *sizes[self.stack_dim :]))

    @property
    def dim(self) -> int:
        """``stack_dim``."""
        return self.stack_dim

    @property
    def device(self) -> torch.device | None:
        """The members' device, or None if one of them has none."""
        return next((None for spec in self.members if spec.device is None), self.members[0].device)

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.members[0].dtype

    # -- values --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _join(self, values: Sequence[Any], dim: int) -> Any:
        """The stack of one value per member."""

    def _split(self, value: Any) -> Sequence[Any]:
        """One value per member; the inverse of `_join`."""
        return value.unbind(self.stack_dim - len(self.shape))

    def _rand(self, shape: Size, generator: torch.Generator | None) -> Any:
        return self._join([spec._rand(shape, generator) for spec in self.members], len(shape))

    def _filled(self, number: int, shape: Size) -> Any:
        return self._join([spec._filled(number, shape) for spec in self.members], len(shape))

    @abc.abstractmethod
    def _refusal(self, value: Any) -> str | None:
        """The reason why ``value`` cannot be split into one value per member, or None."""

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        if (text := self._refusal(value)) is not None:
            yield Mismatch(key, "shape" if hasattr(value, "shape") else "type", text)
            return
        for number, (spec, part) in enumerate(zip(self.members, self._split(value), strict=True)):
            for found in spec.mismatches(part, key):
                yield found._replace(text=f"entry {number} of the stack: {found.text}")

    def project(self, value: Any) -> Any:
        if (text := self._refusal(value)) is not None:
            raise ShapeError(f"{type(self).__name__}.project: {text}.")
        parts = self._split(value)
        projected = [spec.project(part) for spec, part in zip(self.members, parts, strict=True)]
        if all(new is old for new, old in zip(projected, parts, strict=True)):  # a valid value stays the same object
            return value
        return self._join(projected, projected[0].ndim - self.members[0].ndim)

    def encode(self, value: Sequence[Any], *, ignore_device: bool = False) -> Any:
        """Encodes one value per member, given as a list or along the first dim of an array."""
        if len(value) != len(self.members):
            raise ShapeError(
                f"{type(self).__name__}.encode: needs one value per member: got {len(value)}, expected "
                f"{len(self.members)}."
            )
        pairs = zip(self.members, value, strict=True)
        return self._join([spec.encode(part, ignore_device=ignore_device) for spec, part in pairs], 0)

    def _to_numpy(self, value: Any) -> list[Any]:
        """One array per member, because their shapes may differ."""
        return [spec.to_numpy(part) for spec, part in zip(self.members, self._split(value), strict=True)]

    def _enumerate(self, use_mask: bool) -> Any:
        values = [spec.enumerate(use_mask) for spec in self.members]
        picks = combinations([torch.arange(len(each)) for each in values], Size((len(values),)))
        return self._join([each[pick] for each, pick in zip(values, picks.unbind(1), strict=True)], 1)

    # -- shapes and copies ---------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Any:
        if self.stack_dim >= ndim:  # the operation does not affect the stack dim
            members = [spec._shaped(op, ndim) for spec in self.members]
            return stack(members, self.stack_dim + members[0].ndim - self.members[0].ndim)
        # 1. Apply the operation to the members' indices, as a field that varies along the stack dim.
        lead, measured = op.on_shape(self.shape[:ndim], type(self).__name__)
        numbers = torch.arange(len(self.members)).view([-1 if d == self.stack_dim else 1 for d in range(ndim)])
        numbers = op.on_field(numbers, lead, measured, type(self).__name__)
        # 2. Apply it to each remaining member, repeated along the stack dim: the result if all members were that one.
        widen = repeat(self.shape[: ndim - 1], 0, self.stack_dim, len(self.members))
        needed = set(numbers.flatten().tolist()) or {0}  # an empty result still needs a type
        whole = {n: self.members[n]._shaped(widen, ndim - 1)._shaped(op, ndim) for n in needed}
        # 3. Assemble the rows along the dims in which the member changes.
        varying = [
            dim
            for dim, size in enumerate(numbers.shape)
            if size > 1 and bool((numbers != numbers.narrow(dim, 0, 1)).any())
        ]
        return _arranged(numbers, whole, varying)

    def _emptied(self, ndim: int) -> Any:
        at = ndim if self.stack_dim >= ndim else ndim - 1  # the members lack the stack dim
        return stack([spec._emptied(at) for spec in self.members], self.stack_dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        return self.members if dim in (self.stack_dim, self.stack_dim - self.ndim) else super().unbind(dim)

    def __getitem__(self, item: Any) -> Any:
        # An integer index in the stack dim alone returns the member itself, not a copy.
        full = full_index(self.shape, item)
        picked = full[self.stack_dim] if len(full) == self.ndim else None
        inside = isinstance(picked, int) and -len(self.members) <= picked < len(self.members)
        if inside and all(part == slice(None) for part in full if part is not picked):
            return self.members[picked]
        return self._reshaped(index, item)

    def _map(self, change: Callable[[TensorSpec], TensorSpec]) -> Any:
        return type(self)(*[change(spec) for spec in self.members], dim=self.stack_dim)

    def _children(self) -> Sequence[TensorSpec]:
        return self.members

    def _identity(self) -> tuple[Any, ...]:
        return self.stack_dim, self.members

    def __repr__(self) -> str:
        return listing(self, (repr(spec) for spec in self.members), f"dim={self.stack_dim}, shape={tuple(self.shape)}")


def _arranged(numbers: Tensor, specs: Mapping[int, Any], dims: Sequence[int]) -> Any:
    # The spec whose row i, along the dims in which ``numbers`` varies, is row i of specs[numbers[i]].
    if not dims:
        return specs[int(numbers.flatten()[0])] if numbers.numel() else next(iter(specs.values()))
    dim, *below = dims
    parts = []
    for row in range(numbers.shape[dim]):
        there = numbers.select(dim, row)
        rows = {
            number: specs[number]._shaped(select(dim, row), numbers.ndim) for number in set(there.flatten().tolist())
        }
        parts.append(_arranged(there, rows, [each - 1 for each in below]))
    return _kind(parts[0])(*parts, dim=dim)


def _leaf_kind(spec: TensorSpec) -> str:
    if isinstance(spec, Composite):
        return "Composite"
    return _leaf_kind(spec.members[0]) if isinstance(spec, Stacked) else type(spec).__name__


def _kind(spec: TensorSpec) -> type[_Stack]:
    return StackedComposite if isinstance(spec, Composite) else Stacked


class Stacked(_Stack):
    """Leaf specs along a dim in which they differ. Made by `torch.stack`.

    Its values are tensors. If the members' shapes differ, they are nested (jagged), which requires a stack along the
    first dim, no extra leading dims, and members that differ in one dim.

    >>> from llmrl.data.specs import Bounded
    >>> spec = torch.stack([Bounded(0, 1, (2,)), Bounded(5, 6, (2,))])
    >>> type(spec).__name__, spec.project(torch.zeros(2, 2)), spec[1].low
    ('Stacked', tensor([[0., 0.],
            [5., 5.]]), tensor([5., 5.]))
    """

    @property
    def domain(self) -> Any:
        return self.members[0].domain

    def _join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        if all(value.shape == values[0].shape for value in values):
            return torch.stack(list(values), self.stack_dim + dim)
        try:  # torch's jagged layout is ragged in one dim only, right after the first
            if self.stack_dim + dim:
                raise ValueError("the stack is not the first dim")
            return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        except (ValueError, RuntimeError) as error:
            raise ShapeError(
                f"Stacked: values of shapes {[tuple(value.shape) for value in values]} do not form a tensor along dim "
                f"{self.stack_dim + dim} ({error}); use the members one by one, or composites."
            ) from error

    def _split(self, value: Tensor) -> Sequence[Tensor]:
        return value.unbind(0) if value.is_nested else super()._split(value)

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return f"declared a tensor, got {type(value).__name__}"
        if value.is_nested:
            fine = value.ndim == self.ndim and self.stack_dim == 0 and value.size(0) == len(self.members)
        else:
            fine = value.ndim >= self.ndim and value.shape[self.stack_dim - self.ndim] == len(self.members)
        return None if fine else f"declared shape {tuple(self.shape)}, got {tuple(value.shape)}"


class StackedComposite(_Stack, Composite):
    """Composites along a dim in which they differ. Made by `torch.stack`.

    Its keys are those that all members have; other keys are only in the members. Reading or writing an entry acts on
    all members: a written spec is unbound along the stack dim. Its values are lazy stacks.

    >>> from llmrl.data.specs import Bounded
    >>> spec = torch.stack([Composite(x=Bounded(0, 1), y=Bounded(0, 1)), Composite(x=Bounded(5, 6))])
    >>> list(spec.keys()), list(spec[0].keys()), spec["x"].shape
    (['x'], ['x', 'y'], torch.Size([2]))
    """

    def __init__(self, *specs: Composite, dim: int = 0):
        _Stack.__init__(self, *specs, dim=dim)

    @property
    def data_cls(self) -> type | None:  # type: ignore[override]
        return self.members[0].data_cls

    @_Stack.device.setter
    def device(self, device: torch.device | str | int) -> None:
        self._assert_unlocked()
        for spec in self.members:
            spec.device = device

    @property
    def names(self) -> list[str | None]:
        names = self.members[0].names
        return [*names[: self.stack_dim], None, *names[self.stack_dim :]]

    def _to_resize(self, shape: Size) -> list[Composite]:
        assert_begins("stack", self, shape)  # its shape is fixed by its members
        return []

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self.refine_names(names)

    def _set_names(self, names: Sequence[str | None]) -> None:
        self._assert_unlocked()
        for spec in self.members:
            spec._set_names([*names[: self.stack_dim], *names[self.stack_dim + 1 :]])

    def refine_names(self, *names: Any) -> Self:
        raise ConfigError("StackedComposite.refine_names: names come from the members; set names on the members.")

    def _entry(self, name: str) -> Any:
        found = [spec._entry(name) for spec in self.members]
        for nothing in (MISSING, None):
            if any(entry is nothing for entry in found):
                return nothing
        if isinstance(found[0], Composite):
            return StackedComposite(*found, dim=self.stack_dim)  # never dense, so that writes to it reach the members
        return stack(found, self.stack_dim)

    def _entry_names(self) -> Sequence[str]:
        return [name for name in self.members[0]._entry_names() if all(name in spec for spec in self.members[1:])]

    def __setitem__(self, key: NestedKey, spec: TensorSpec | Mapping[str, Any] | None) -> None:
        self._assert_unlocked()
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self.device)
        parts = [None] * len(self.members)
        if isinstance(spec, TensorSpec):
            if len(spec.shape) < self.ndim or spec.shape[self.stack_dim] != len(parts):
                raise ShapeError(
                    f"StackedComposite: the shape of {key!r} must begin with {tuple(self.shape)}: got "
                    f"{tuple(spec.shape)}."
                )
            parts = spec.unbind(self.stack_dim)
        elif spec is not None:
            raise TypeError(f"StackedComposite: {key!r} must be a spec or None: got {type(spec).__name__}.")
        written = [member.clone() for member in self.members]  # tried on copies: all members are written, or none
        for member, part in zip(written, parts, strict=True):
            member[key] = part
        for member, part in zip(self.members, parts, strict=True):
            member[key] = part

    def _drop(self, path: Sequence[str]) -> bool:
        # Removes the entry from every member that has it, also if only some do and it is not a key of the stack.
        for spec in (self, *self.members):
            spec._assert_unlocked()
        return any([spec._drop(path) for spec in self.members])

    def update(self, specs: Mapping[str, Any] | Composite) -> Self:
        if isinstance(specs, StackedComposite) and specs.stack_dim == self.stack_dim:
            for mine, other in zip(self.members, specs.members, strict=True):
                mine.update(other)
            return self
        return super().update(specs)

    def is_empty(self, recurse: bool = False) -> bool:
        return all(spec.is_empty(recurse) for spec in self.members)

    def empty(self) -> Self:
        return self._map(lambda spec: spec.empty())

    def __getitem__(self, item: Any) -> Any:
        return Composite.__getitem__(self, item) if is_key(item) else _Stack.__getitem__(self, item)

    def _emptied(self, ndim: int) -> Self:
        return self.empty()

    def _join(self, values: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
        if any(value.device != values[0].device for value in values):  # a lazy stack has one device or none
            values = [value.copy().clear_device_() for value in values]
        return lazy_stack(list(values), self.stack_dim + dim)

    def _refusal(self, value: Any) -> str | None:
        if not is_tensor_collection(value):
            return f"declared a tensordict, got {type(value).__name__}"
        size = value.batch_size
        fine = len(size) >= self.ndim and size[self.stack_dim - self.ndim] == len(self.members)
        return None if fine else f"declared batch size {tuple(self.shape)}, got {tuple(size)}"

    def _locked_along(self, recurse: bool) -> list[Composite]:
        return list(self.members)


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """True if ``spec`` is or contains, at any depth, a `Stacked` or `StackedComposite`."""
    if isinstance(spec, (Stacked, StackedComposite)):
        return True
    return isinstance(spec, Composite) and any(contains_lazy_spec(child) for child in spec.values())


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """True if the members of every stack in ``spec`` have the same keys; ``recurse=False`` checks only ``spec`` itself.

    >>> from llmrl.data.specs import Unbounded
    >>> spec = torch.stack([Composite(x=Unbounded(), y=Unbounded()), Composite(x=Unbounded())])
    >>> check_no_exclusive_keys(spec), check_no_exclusive_keys(consolidate_spec(spec))
    (False, True)
    """
    if isinstance(spec, StackedComposite):
        if any(set(member.keys()) != set(spec.members[0].keys()) for member in spec.members):
            return False
        nested = [spec[name] for name, entry in spec.members[0].items() if isinstance(entry, Composite)]
        children = [*spec.members, *nested]
    else:
        children = spec.values() if isinstance(spec, Composite) else ()
    return not recurse or all(check_no_exclusive_keys(child) for child in children)


def consolidate_spec(
    spec: Composite, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> Composite:
    """A copy in which the members of a `StackedComposite` have every key that any of them has.

    A missing key gets a spec of the same type as in another member, with size 0 in the dims after the member's own
    (without such dims, an equal spec); a `Composite` is added without entries and then filled in the same way.

    ``recurse_through_entries`` continues in nested composites, ``recurse_through_stack`` in the members of stacks.

    >>> from llmrl.data.specs import Unbounded
    >>> spec = torch.stack([Composite(x=Unbounded((3,))), Composite()])
    >>> consolidate_spec(spec)[1]["x"].shape
    torch.Size([0])
    """
    spec = spec.clone()
    if isinstance(spec, StackedComposite):
        if recurse_through_stack:  # stacks within a member first
            members = [consolidate_spec(member, recurse_through_entries) for member in spec.members]
            spec = StackedComposite(*members, dim=spec.stack_dim)
        _complete(spec, recurse_through_entries)
        return spec
    for key, child in list(spec.items()) if recurse_through_entries else ():
        if isinstance(child, Composite):
            spec[key] = consolidate_spec(child, recurse_through_entries, recurse_through_stack)
    return spec


def _complete(spec: StackedComposite, recurse: bool) -> None:
    names = dict.fromkeys(name for member in spec.members for name in member.keys())  # an ordered set
    for name in names:
        known = next(member[name] for member in spec.members if name in member)
        for member in spec.members:
            if name not in member:
                member[name] = None if known is None else known._emptied(member.ndim)
        if recurse and isinstance(entry := spec[name], StackedComposite):
            _complete(entry, recurse)
