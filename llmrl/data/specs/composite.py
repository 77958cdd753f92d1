"""`Composite`: the spec of a tensordict, a mapping from names to specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Size

from llmrl.data.ragged.tensordicts import inner, rewrap
from llmrl.data.specs.base import Device, Mismatch, Shape, TensorSpec, as_device, combinations, fits, listing
from llmrl.data.specs.entries import MISSING, NamedSpec, is_key, path_of
from llmrl.data.specs.shape import ShapeOp, as_size, select
from llmrl.errors import ConfigError, MissingKeyError, ShapeError, did_you_mean

_FORBIDDEN = ("shape", "device", "dtype", "space")
_ARGUMENTS = ("shape", "batch_size", "device", "data_cls", "step_mdp_static", "names")


class Composite(NamedSpec):
    """The spec of a tensordict: maps names to specs; nested keys are tuples. Built from a mapping, keywords or both.

    ``shape`` (or ``batch_size``) is the batch size of the tensordict; the shape of every entry begins with it.
    ``names`` are the names of its dims. A nested `Composite` with fewer dims takes this shape, and every nested
    `Composite` takes the names; if that changes it, a copy is stored. With ``device``, all entries are on it. With
    ``data_cls``, values are of that tensorclass. An entry of None is unspecified. ``step_mdp_static`` marks entries
    that do not change from one step to the next.

    Raises  ShapeError for an entry whose shape does not begin with ``shape``; RuntimeError for one on another device,
            and for a write while locked; AttributeError for an entry named shape, device, dtype or space; TypeError for
            one that is not a spec

    >>> from llmrl.data.specs import Categorical, Unbounded
    >>> spec = Composite({"agent": {"done": Categorical(2, dtype=torch.bool)}}, obs=Unbounded(shape=(3,)))
    >>> spec["agent", "done"].dtype, list(spec.keys(include_nested=True, leaves_only=True))
    (torch.bool, [('agent', 'done'), 'obs'])
    """

    dtype = None

    def __init__(
        self,
        specs: Mapping[str, TensorSpec | Mapping[str, Any] | None] | None = None,
        /,
        *,
        shape: Shape = None,
        batch_size: Shape = None,
        device: Device = None,
        data_cls: type | None = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **entries: TensorSpec | Mapping[str, Any] | None,
    ):
        if shape is not None and batch_size is not None:
            raise ConfigError("Composite: shape and batch_size are two names for the same setting: pass only one.")
        shape = batch_size if shape is None else shape
        self._shape = as_size(shape)
        self._device = None if device is None else as_device(device)
        self.data_cls = data_cls
        self.step_mdp_static = step_mdp_static
        self._dim_names: list[str | None] | None = None
        self._specs: dict[str, TensorSpec | None] = {}
        if names is not None:
            self.refine_names(*names)
        for key, spec in {**dict(specs or {}), **entries}.items():
            self[key] = spec

    # -- the mapping ---------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> Any:
        return self._specs.get(name, MISSING)

    def _entry_names(self) -> Sequence[str]:
        return tuple(self._specs)

    def __getitem__(self, item: Any) -> Any:
        """The entry, for a key; the `Composite` of the indexed batch, for any index that a tensor accepts."""
        if not is_key(item):
            return super().__getitem__(item)
        found = self.get(item, MISSING)
        if found is MISSING:
            known = [key if isinstance(key, str) else ".".join(key) for key in self.keys(include_nested=True)]
            name = item if isinstance(item, str) else ".".join(item)
            raise MissingKeyError(
                f"Composite: no entry {item!r}; keys present: {', '.join(known)}.{did_you_mean(name, known)}"
            )
        return found

    def __setitem__(self, key: NestedKey, spec: TensorSpec | Mapping[str, Any] | None) -> None:
        self._assert_unlocked()
        first, *rest = path_of(key)
        if rest:
            child = self._specs.get(first)
            if not isinstance(child, Composite):
                child = self.empty()
                self[first] = child
            child[tuple(rest)] = spec
            return
        if first in _FORBIDDEN:
            raise AttributeError(f"Composite: an entry cannot be named {', '.join(_FORBIDDEN)}: got {first!r}.")
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self._device)
        self._specs[first] = None if spec is None else self._fitting(first, spec)

    def _fitting(self, name: str, spec: TensorSpec) -> TensorSpec:
        if not isinstance(spec, TensorSpec):
            raise TypeError(
                f"Composite: {name!r} must be a spec, a mapping of specs or None: got {type(spec).__name__}."
                + did_you_mean(name, _ARGUMENTS)
            )
        if isinstance(spec, Composite):
            names = [*self.names, *spec.names[len(self.shape) :]]
            shorter, renamed = len(spec.shape) < len(self.shape), self._dim_names is not None and names != spec.names
            # Changes only a copy: the caller may use the original elsewhere.
            spec = spec.clone() if shorter or renamed else spec
            if shorter:
                spec._resize(self.shape)
            if renamed:
                spec._set_names(names)
        assert_begins(name, spec, self.shape)
        if self._device is None or spec.device == self._device:
            return spec
        if isinstance(spec, Composite) and spec.device is None:
            return spec.to(self._device)
        raise RuntimeError(
            f"Composite: All devices must match: {name!r} is on {spec.device}, expected {self._device}; use .to()."
        )

    def set(self, key: NestedKey, spec: TensorSpec | Mapping[str, Any] | None) -> Self:
        """``self[key] = spec``. Returns self."""
        self[key] = spec
        return self

    def __delitem__(self, key: NestedKey) -> None:
        if not self._drop(path_of(key)):
            self[key]  # raises the error that lists the keys

    def pop(self, key: NestedKey, default: Any = MISSING) -> Any:
        """Removes and returns an entry. Raises MissingKeyError if it is absent and no default is given."""
        self._assert_unlocked()
        if default is not MISSING and key not in self:
            return default
        found = self[key]
        self._drop(path_of(key))
        return found

    def _drop(self, path: Sequence[str]) -> bool:
        """Removes an entry. Returns True if it was present."""
        self._assert_unlocked()
        first, *rest = path
        if not rest:
            return self._specs.pop(first, MISSING) is not MISSING
        child = self._specs.get(first)
        return isinstance(child, Composite) and child._drop(rest)

    def update(self, specs: Mapping[str, Any] | Composite) -> Self:
        """Sets every entry of ``specs``; if both have a nested `Composite`, updates it recursively. Returns self."""
        for key, spec in specs.items():
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, (Mapping, Composite)):
                mine.update(spec)
            else:
                self[key] = spec
        return self

    def is_empty(self, recurse: bool = False) -> bool:
        """True if there are no entries; with ``recurse``, no leaves at any depth."""
        return not any(True for _ in self.keys(recurse, recurse))

    def empty(self) -> Self:
        """A `Composite` of the same shape and device without entries."""
        return self._with({})

    def separates(self, *keys: NestedKey, default: Any = MISSING) -> Self:
        """A new `Composite` with only these entries. An absent key raises, or gets ``default`` if one is given."""
        out = self.empty()
        for key in keys:
            out[key] = self[key] if default is MISSING else self.get(key, default)
        return out

    # -- shape, device and names ---------------------------------------------------------------------------------------

    @property
    def shape(self) -> Size:  # type: ignore[override]
        """The batch size. Setting it also resizes nested composites whose shape does not begin with it.

        Raises (when set)  ShapeError for a leaf that does not begin with it; RuntimeError while locked
        """
        return self._shape

    @shape.setter
    def shape(self, shape: Sequence[int] | int) -> None:
        self._resize(as_size(shape))

    def _resize(self, shape: Size) -> None:
        for spec in self._to_resize(shape):
            spec._shape = shape
            if spec._dim_names is not None:
                spec._dim_names = [*spec._dim_names, *[None] * len(shape)][: len(shape)]

    def _to_resize(self, shape: Size) -> list[Composite]:
        """The composites to resize; all are checked before any is changed, so that an error changes none."""
        self._assert_unlocked()
        found = [self]
        for name, spec in self._specs.items():
            if isinstance(spec, Composite) and not _begins(spec, shape):
                found += spec._to_resize(shape)
            elif spec is not None:
                assert_begins(name, spec, shape)
        return found

    @property
    def batch_size(self) -> Size:
        """``shape``."""
        return self.shape

    @property
    def device(self) -> torch.device | None:
        """The device of every entry; None if entries may differ. Setting it moves every entry."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str | int) -> None:
        self._assert_unlocked()
        self._specs = self.to(device)._specs
        self._device = as_device(device)

    def clear_device_(self) -> Self:
        self._assert_unlocked()
        self._device = None
        return super().clear_device_()

    @property
    def names(self) -> list[str | None]:
        """The names of the dims, None for an unnamed dim; shared with nested composites, ignored by equality."""
        return [None] * len(self.shape) if self._dim_names is None else list(self._dim_names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        names = [None] * len(self.shape) if names is None else list(names)
        self._assert_one_each(names)
        self._set_names(names)

    def refine_names(self, *names: Any) -> Self:
        """Names dims in place; an Ellipsis stands for dims that keep their names. Returns self.

        Raises  ConfigError if there is not one name per dim, or if a dim already has another name
        """
        given, own = list(names), self.names
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given[at : at + 1] = own[at : at + 1 + len(own) - len(given)]
        self._assert_one_each(given)
        for new, old in zip(given, own, strict=True):
            if old is not None and new != old:
                raise ConfigError(f"Composite.refine_names: a named dim cannot be renamed: got {new!r} for {old!r}.")
        self._set_names(given)
        return self

    def _assert_one_each(self, names: Sequence[Any]) -> None:
        if len(names) != len(self.shape):
            raise ConfigError(f"Composite: names needs one name per dim: got {names}, shape {tuple(self.shape)}.")

    def _set_names(self, names: Sequence[str | None]) -> None:
        self._assert_unlocked()
        for spec in self._children():
            if isinstance(spec, Composite):
                spec._set_names([*names, *spec.names[len(names) :]])
        self._dim_names = None if all(name is None for name in names) else list(names)

    # -- values --------------------------------------------------------------------------------------------------------

    def _rand(self, shape: Size, generator: torch.Generator | None) -> TensorDictBase:
        return self._made(lambda spec: spec.rand(shape, generator=generator), self._full_shape(shape))

    def _filled(self, number: int, shape: Size) -> TensorDictBase:
        return self._made(lambda spec: spec._filled(number, shape), self._full_shape(shape))

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Raises TypeError if ``value`` has the wrong type or dtype. With ``key``, checks only that entry, which
        ``value`` contains or is."""
        spec = self if key is None else self[key]
        if key is not None and is_tensor_collection(value) and not is_non_tensor(value):
            value = value.get(key, value)
        if spec is not None:
            TensorSpec.type_check(spec, value, key)

    def mismatches(self, value: Any, key: tuple[str, ...] = ()) -> Iterator[Mismatch]:
        if not is_tensor_collection(value):
            yield Mismatch(key, "type", f"declared a tensordict, got {type(value).__name__}")
            return
        if self.data_cls is not None and not isinstance(value, self.data_cls):
            yield Mismatch(key, "type", f"declared {self.data_cls.__name__}, got {type(value).__name__}")
            return
        if not fits(value.batch_size, self.shape):
            yield Mismatch(key, "shape", f"declared batch size {tuple(self.shape)}, got {tuple(value.batch_size)}")
            return
        held = inner(value)
        if isinstance(held, LazyStackedTensorDict):
            row_spec = self._row(held)
            for row in held.tensordicts:
                found = list(row_spec.mismatches(row, key))
                yield from found
                if found:
                    return  # the other rows would report the same
            return
        keys = held.keys()
        for name, spec in self._specified():
            if name not in keys:
                present = ", ".join(sorted(keys)) or "none"
                yield Mismatch((*key, name), "missing", f"declared but missing; keys present: {present}")
            else:
                yield from spec.mismatches(held.get(name), (*key, name))

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """A shallow copy of ``value`` with every entry that has a spec projected; others are unchanged."""
        if is_tensorclass(value):
            return rewrap(value, self.project(inner(value)))
        if isinstance(value, LazyStackedTensorDict):
            row_spec = self._row(value)
            rows = [row_spec.project(row) for row in value.tensordicts]
            return LazyStackedTensorDict.lazy_stack(rows, value.stack_dim)
        out = value.exclude()
        keys = value.keys()
        for name, spec in self._specified():
            if name in keys:
                out.set(name, spec.project(out.get(name)))
        return out

    def encode(self, value: Mapping[str, Any] | TensorDictBase, *, ignore_device: bool = False) -> TensorDictBase:
        """A tensordict from a nested mapping of numbers, lists and arrays. Raises MissingKeyError for unknown names."""
        entries = {}
        for name, entry in value.items():
            spec = self[name]
            entries[name] = entry if spec is None else spec.encode(entry, ignore_device=ignore_device)
        return self._wrap(entries, self._full_shape(()), None if ignore_device else self._device)

    def _to_numpy(self, value: TensorDictBase) -> dict[str, Any]:
        """The entries as nested dicts of arrays."""
        return {name: spec.to_numpy(value.get(name)) for name, spec in self._specified()}

    def _enumerate(self, use_mask: bool) -> TensorDictBase:
        # Every combination of the entries' values; the last entry varies fastest.
        named = {name: spec.enumerate(use_mask) for name, spec in self._specified()}
        picks = combinations([torch.arange(len(values)) for values in named.values()], Size((len(named),)))
        # Combines positions and indexes the values with them: an entry may be a tensordict or a string.
        entries = {name: values[pick] for (name, values), pick in zip(named.items(), picks.unbind(1), strict=True)}
        return self._wrap(entries, (len(picks), *self.shape), self._device)

    # -- shapes and copies ---------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        lead, measured = op.on_shape(self.shape[:ndim], type(self).__name__)
        new = super()._shaped(op, ndim)
        new._shape = Size((*lead, *self.shape[ndim:]))
        if self._dim_names is not None:  # a tensordict derives the names of the new dims
            named = TensorDict(batch_size=measured, names=self._dim_names[:ndim])
            new._dim_names = [*op.apply(named, Size()).names, *self._dim_names[ndim:]]
        return new

    def _emptied(self, ndim: int) -> Self:
        return self.empty()

    def _to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        """A copy with every entry moved to a device or cast to a dtype."""
        new = super()._to(dest)
        if not isinstance(dest, torch.dtype):
            new._device = as_device(dest)
        return new

    def _map(self, change: Callable[[TensorSpec], TensorSpec]) -> Self:
        """An unlocked copy with every entry changed."""
        return self._with({key: None if spec is None else change(spec) for key, spec in self._specs.items()})

    def _children(self) -> Sequence[TensorSpec]:
        return [spec for _, spec in self._specified()]

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self._device, self.data_cls, self.step_mdp_static, self._specs

    def __repr__(self) -> str:
        cls = "" if self.data_cls is None else f", data_cls={self.data_cls.__name__}"
        rows = (f"{name}: {spec!r}" for name, spec in self._specs.items())
        return listing(self, rows, f"shape={tuple(self.shape)}, device={self._device}{cls}")

    def _with(self, specs: dict[str, TensorSpec | None]) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self), _specs=specs, is_locked=False, _holders=(), _leaf_keys=None)
        return new

    def _made(self, value: Callable[[TensorSpec], Any], batch_size: Sequence[int]) -> TensorDictBase:
        entries = {name: value(spec) for name, spec in self._specified()}
        return self._wrap(entries, batch_size, self._device)

    def _specified(self) -> list[tuple[str, TensorSpec]]:
        return [(name, spec) for name, spec in self._specs.items() if spec is not None]

    def _wrap(self, entries: dict[str, Any], batch_size: Sequence[int], device: torch.device | None) -> TensorDictBase:
        names = self._dim_names and [*[None] * (len(batch_size) - len(self.shape)), *self._dim_names]
        td = TensorDict(entries, batch_size=batch_size, device=device, names=names or None)
        return td if self.data_cls is None else self.data_cls.from_tensordict(td)

    def _row(self, stack: LazyStackedTensorDict) -> Composite:
        # The spec of one member of a stack. The members of a stack over an extra leading dim have this same spec.
        dim = stack.stack_dim - (stack.ndim - len(self.shape))
        row = self.clone() if dim < 0 else self._shaped(select(dim, 0), len(self.shape))
        row.data_cls = None
        return row


def _begins(spec: TensorSpec, shape: Size) -> bool:
    return spec.shape[: len(shape)] == shape and len(spec.shape) - spec._kept >= len(shape)


def assert_begins(name: str, spec: TensorSpec, shape: Size) -> None:
    if not _begins(spec, shape):
        raise ShapeError(
            f"Composite: the shape of {name!r} must begin with the Composite's, {tuple(shape)}: got "
            f"{tuple(spec.shape)}; expand it."
        )
