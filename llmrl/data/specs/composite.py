"""`Composite`: a mapping of specs, for tensordicts. What one entry may be is the leaf specs' part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Size

from llmrl.data.specs.base import Mismatch, TensorSpec, as_device, combinations, fits, listing
from llmrl.data.specs.shape import ShapeOp, select
from llmrl.errors import ConfigError, MissingKeyError, ShapeError, near

__all__ = ["Composite"]

_FORBIDDEN = ("shape", "device", "dtype", "space")
_ARGUMENTS = ("shape", "batch_size", "device", "data_cls", "step_mdp_static", "names")
_RAISE: Any = object()


class Composite(TensorSpec):
    """A tensordict's spec: names to specs, nested by tuples as in a tensordict. Made from a mapping, keywords, or both.

    ``shape`` (or ``batch_size``) is the batch size of the tensordict: every entry's shape begins with it; ``names``
    are the names of its dims. With ``device``, every entry is on it. With ``data_cls``, values are made and expected as
    that tensorclass. An entry may be None: not specified. ``step_mdp_static`` marks entries that do not change from one
    step to the next, for those who ask.

    Raises  ShapeError for an entry whose shape does not begin with ``shape``; RuntimeError for one on another device,
            and for a write while locked; AttributeError for an entry named shape, device, dtype or space; TypeError for
            one that is no spec

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
        shape: Sequence[int] | int | None = None,
        batch_size: Sequence[int] | int | None = None,
        device: torch.device | str | int | None = None,
        data_cls: type | None = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **entries: TensorSpec | Mapping[str, Any] | None,
    ):
        if shape is not None and batch_size is not None:
            raise ConfigError("Composite: shape and batch_size are two names for one thing: give one of them.")
        shape = batch_size if shape is None else shape
        self.shape = Size(() if shape is None else [shape] if isinstance(shape, int) else shape)
        self._device = None if device is None else as_device(device)
        self.data_cls = data_cls
        self.step_mdp_static = step_mdp_static
        self._dim_names: list[str | None] | None = None
        self._specs: dict[str, TensorSpec | None] = {}
        self.is_locked = False
        self._leaf_keys: tuple[NestedKey, ...] | None = None
        if names is not None:
            self.refine_names(*names)
        for key, spec in {**dict(specs or {}), **entries}.items():
            self[key] = spec

    # -- the mapping ---------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> Any:
        return self._specs.get(name, _RAISE)

    def _entry_names(self) -> Sequence[str]:
        return tuple(self._specs)

    def __getitem__(self, item: Any) -> Any:
        """An entry, for a key; the `Composite` of the indexed batch, for anything else that a tensor can be indexed
        with."""
        if not _is_key(item):
            return super().__getitem__(item)
        found = self.get(item, _RAISE)
        if found is _RAISE:
            known = [key if isinstance(key, str) else ".".join(key) for key in self.keys(include_nested=True)]
            name = item if isinstance(item, str) else ".".join(item)
            raise MissingKeyError(
                f"Composite: {item!r} is not in it; keys present: {', '.join(known)}.{near(name, known)}"
            )
        return found

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The entry, or ``default``."""
        first, *rest = _path(key)
        found = self._entry(first)
        if found is _RAISE:
            return default
        if not rest:
            return found
        return found.get(tuple(rest), default) if isinstance(found, Composite) else default

    def __setitem__(self, key: NestedKey, spec: TensorSpec | Mapping[str, Any] | None) -> None:
        self._assert_unlocked()
        first, *rest = _path(key)
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
                + near(name, _ARGUMENTS)
            )
        if spec.shape[: len(self.shape)] != self.shape or len(spec.shape) - spec._kept < len(self.shape):
            raise ShapeError(
                f"Composite: the shape of {name!r} must begin with the Composite's, {tuple(self.shape)}: got "
                f"{tuple(spec.shape)}; expand it."
            )
        if self._device is not None and spec.device != self._device:
            if not isinstance(spec, Composite) or spec.device is not None:
                raise RuntimeError(
                    f"Composite: All devices must match: {name!r} is on {spec.device}, expected {self._device}; "
                    "use .to()."
                )
            return spec.to(self._device)
        return spec

    def set(self, key: NestedKey, spec: TensorSpec | Mapping[str, Any] | None) -> Self:
        """``self[key] = spec``. Returns self."""
        self[key] = spec
        return self

    def __delitem__(self, key: NestedKey) -> None:
        self.pop(key)

    def pop(self, key: NestedKey, default: Any = _RAISE) -> Any:
        """Takes an entry out. Raises MissingKeyError if it is not there and no default is given."""
        self._assert_unlocked()
        found = self.get(key, _RAISE)
        if found is _RAISE:
            return self[key] if default is _RAISE else default  # the error that lists what is there
        *parents, last = _path(key)
        parent = self[tuple(parents)] if parents else self
        parent._drop(last)
        return found

    def _drop(self, name: str) -> None:
        self._assert_unlocked()
        del self._specs[name]

    def update(self, specs: Mapping[str, Any] | Composite) -> Self:
        """Sets every entry of ``specs``; where both have a nested `Composite`, updates it in turn. Returns self."""
        for key, spec in specs.items():
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, (Mapping, Composite)):
                mine.update(spec)
            else:
                self[key] = spec
        return self

    def __contains__(self, item: Any) -> bool:
        """Whether a key is there; for a value, whether it `is_in`."""
        return self.get(item, _RAISE) is not _RAISE if _is_key(item) else self.is_in(item)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[NestedKey]:
        return (key for key, _ in self.items(include_nested, leaves_only))

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[TensorSpec | None]:
        return (spec for _, spec in self.items(include_nested, leaves_only))

    def items(
        self, include_nested: bool = False, leaves_only: bool = False
    ) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        for key in self._entry_names():
            spec = self._entry(key)
            nested = isinstance(spec, Composite)
            if not (nested and leaves_only):
                yield key, spec
            if nested and include_nested:
                for below, leaf in spec.items(True, leaves_only):
                    yield (key, *_path(below)), leaf

    @property
    def leaf_keys(self) -> tuple[NestedKey, ...]:
        """The keys of all leaves, nested ones included; kept while the spec is locked."""
        if self._leaf_keys is None or not self.is_locked:
            self._leaf_keys = tuple(self.keys(include_nested=True, leaves_only=True))
        return self._leaf_keys

    def __iter__(self) -> Iterator[NestedKey]:
        return self.keys()

    def __len__(self) -> int:
        return len(self._entry_names())

    def is_empty(self, recurse: bool = False) -> bool:
        """Whether there is no entry; with ``recurse``, no leaf however deep."""
        return not any(True for _ in self.keys(recurse, recurse))

    def empty(self) -> Self:
        """A `Composite` of the same shape and device without entries."""
        return self._with({})

    def separates(self, *keys: NestedKey, default: Any = _RAISE) -> Self:
        """A `Composite` of these entries alone; this one keeps them. Absent keys raise, or get ``default`` if one is
        given."""
        out = self.empty()
        for key in keys:
            found = self.get(key, _RAISE)
            out[key] = (self[key] if default is _RAISE else default) if found is _RAISE else found
        return out

    def lock_(self, recurse: bool = True) -> Self:
        """Refuses writes from now on, also in nested ones if ``recurse``. Returns self."""
        return self._set_lock(True, recurse)

    def unlock_(self, recurse: bool = True) -> Self:
        """Allows writes again. Returns self."""
        return self._set_lock(False, recurse)

    # -- device and names ----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> Size:
        """``shape``."""
        return self.shape

    @property
    def device(self) -> torch.device | None:
        """The device of every entry, or None where it is left to them. Setting it moves every entry."""
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
        """The names of the dims, None where one has none."""
        return [None] * len(self.shape) if self._dim_names is None else list(self._dim_names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._dim_names = None
        if names is not None:
            self.refine_names(*names)

    def refine_names(self, *names: Any) -> Self:
        """Names dims, in place; an Ellipsis stands for those that keep theirs. Returns self.

        Raises  ConfigError for another number of names than dims, and for a dim that has another name already
        """
        self._assert_unlocked()
        given, own = list(names), self.names
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given[at : at + 1] = own[at : at + 1 + len(own) - len(given)]
        if len(given) != len(own):
            raise ConfigError(
                f"Composite.refine_names: needs one name per dim: got {names}, shape {tuple(self.shape)}."
            )
        for new, old in zip(given, own, strict=True):
            if old is not None and new != old:
                raise ConfigError(f"Composite.refine_names: a dim keeps its name: got {new!r} for {old!r}.")
        self._dim_names = given
        return self

    # -- values --------------------------------------------------------------------------------------------------------

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> TensorDictBase:
        return self._make(shape, lambda spec: spec.rand(shape, generator=generator))

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._make(shape, lambda spec: spec.zero(shape))

    def one(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._make(shape, lambda spec: spec.one(shape))

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
        inner = value._tensordict if is_tensorclass(value) else value
        if isinstance(inner, LazyStackedTensorDict):
            row_spec = self._row(inner, data_cls=None)
            for row in inner.tensordicts:
                found = list(row_spec.mismatches(row, key))
                yield from found
                if found:
                    return  # the other rows have the same story to tell
            return
        keys = inner.keys()
        for name, spec in self._specs.items():
            if spec is None:
                continue
            if name not in keys:
                present = ", ".join(sorted(keys)) or "none"
                yield Mismatch((*key, name), "missing", f"declared, but not there; keys present: {present}")
            else:
                yield from spec.mismatches(inner.get(name), (*key, name))

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """A shallow copy of ``value`` with every entry that has a spec projected; the others stay."""
        if is_tensorclass(value):
            return type(value)._from_tensordict(self.project(value._tensordict), dict(value._non_tensordict))
        if isinstance(value, LazyStackedTensorDict):
            row_spec = self._row(value)
            return LazyStackedTensorDict.lazy_stack(
                [row_spec.project(row) for row in value.tensordicts], value.stack_dim
            )
        out = value.exclude()
        keys = value.keys()
        for name, spec in self._specs.items():
            if spec is not None and name in keys:
                out.set(name, spec.project(out.get(name)))
        return out

    def encode(self, value: Mapping[str, Any] | TensorDictBase) -> TensorDictBase:
        """A nested mapping of numbers, lists and arrays as a tensordict. Raises MissingKeyError for an unknown name."""
        entries = {}
        for name, entry in value.items():
            spec = self[name]
            entries[name] = entry if spec is None else spec.encode(entry)
        return self._wrap(entries, self._full_shape(()))

    def to_numpy(self, value: TensorDictBase) -> dict[str, Any]:
        """The entries as nested dicts of arrays."""
        return {name: spec.to_numpy(value.get(name)) for name, spec in self._specs.items() if spec is not None}

    def _enumerate(self, use_mask: bool) -> TensorDictBase:
        # Every combination of the entries' values; the last entry varies fastest.
        named = {name: spec.enumerate(use_mask) for name, spec in self._specs.items() if spec is not None}
        picks = combinations([torch.arange(len(values)) for values in named.values()], Size((len(named),)))
        entries = {name: values[pick] for (name, values), pick in zip(named.items(), picks.unbind(1), strict=True)}
        return self._wrap(entries, (len(picks), *self.shape))

    # -- shapes and copies ---------------------------------------------------------------------------------------------

    def _shaped(self, op: ShapeOp, ndim: int) -> Self:
        lead, measured = op.on_shape(self.shape[:ndim], type(self).__name__)
        specs = {key: None if spec is None else spec._shaped(op, ndim) for key, spec in self._specs.items()}
        new = self._with(specs, shape=Size((*lead, *self.shape[ndim:])))
        if self._dim_names is not None:  # those that the dims of a tensordict would have
            named = TensorDict(batch_size=measured, names=self._dim_names[:ndim])
            new._dim_names = [*op.apply(named, Size()).names, *self._dim_names[ndim:]]
        return new

    def _emptied(self, ndim: int) -> Self:
        return self.empty()

    def to(self, dest: torch.device | str | int | torch.dtype) -> Self:
        """Every entry moved to a device, or cast to a dtype."""
        specs = {key: None if spec is None else spec.to(dest) for key, spec in self._specs.items()}
        new = self._with(specs)
        if not isinstance(dest, torch.dtype):
            new._device = as_device(dest)
        return new

    def clone(self) -> Self:
        """An unlocked copy, nested ones included."""
        return self._with({key: None if spec is None else spec.clone() for key, spec in self._specs.items()})

    def _children(self) -> Sequence[TensorSpec]:
        return [spec for spec in self._specs.values() if spec is not None]

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self._device, self.data_cls, self.step_mdp_static, self.names, self._specs

    def __repr__(self) -> str:
        cls = "" if self.data_cls is None else f", data_cls={self.data_cls.__name__}"
        rows = (f"{name}: {spec!r}" for name, spec in self._specs.items())
        return listing(self, rows, f"shape={tuple(self.shape)}, device={self._device}{cls}")

    def _with(self, specs: dict[str, TensorSpec | None], shape: Size | None = None) -> Self:
        new = copy.copy(self)
        new._specs = specs
        new.shape = self.shape if shape is None else shape
        new.is_locked = False
        new._leaf_keys = None
        return new

    def _set_lock(self, locked: bool, recurse: bool) -> Self:
        self.is_locked = locked
        self._leaf_keys = None
        if recurse:
            for spec in self._specs.values():
                if isinstance(spec, Composite):
                    spec._set_lock(locked, recurse)
        return self

    def _assert_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError("Composite: cannot write to a locked spec; change a clone(), or unlock_() it.")

    def _make(self, shape: Sequence[int], make: Callable[[TensorSpec], Any]) -> TensorDictBase:
        entries = {key: make(spec) for key, spec in self._specs.items() if spec is not None}
        return self._wrap(entries, self._full_shape(shape))

    def _wrap(self, entries: dict[str, Any], batch_size: Sequence[int]) -> TensorDictBase:
        names = self._dim_names and [*[None] * (len(batch_size) - len(self.shape)), *self._dim_names]
        td = TensorDict(entries, batch_size=batch_size, device=self._device, names=names or None)
        return td if self.data_cls is None else self.data_cls.from_tensordict(td)

    def _row(self, stack: LazyStackedTensorDict, data_cls: type | None = None) -> Composite:
        # The spec of one member of a stack; a stack over extra leading dims has members of this very spec.
        dim = stack.stack_dim - (stack.ndim - len(self.shape))
        row = self.clone() if dim < 0 else self._shaped(select(dim, 0), len(self.shape))
        row.data_cls = data_cls
        return row


def _is_key(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, tuple) and bool(item) and all(isinstance(i, str) for i in item))


def _path(key: NestedKey) -> tuple[str, ...]:
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key or not all(isinstance(part, str) for part in key):
        raise TypeError(f"Composite: a key is a string or a tuple of strings: got {key!r}.")
    return key
