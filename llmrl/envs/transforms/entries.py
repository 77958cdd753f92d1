"""Transforms that select, rename, join, cast and normalise entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import required
from llmrl.data.specs import Bounded, Composite, TensorSpec, Unbounded
from llmrl.data.ted_utils import as_key
from llmrl.envs.specs import DONE_KEYS, EnvSpecs
from llmrl.envs.transforms.base import Keys, Transform
from llmrl.errors import ConfigError


class EntryTransform(Transform):
    """Maps entries one by one, and the spec of each. Subclasses implement ``_apply_transform`` and ``_entry_spec``."""

    def _entry_spec(self, spec: TensorSpec) -> TensorSpec:
        """Returns the spec of the values that ``_apply_transform`` returns for values of ``spec``."""
        return spec

    def _map_specs(self, spec: Composite) -> Composite:
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys):
            if in_key in spec:
                spec[out_key] = self._entry_spec(spec[in_key])
        return spec

    def _map_input_specs(self, spec: Composite) -> Composite:
        for in_key, out_key in self._pairs(self.in_keys_inv, self.out_keys_inv):
            if in_key in spec:
                spec[out_key] = self._entry_spec(spec.pop(in_key))
        return spec

    transform_observation_spec = transform_reward_spec = _map_specs
    transform_action_spec = transform_state_spec = _map_input_specs


class SelectTransform(Transform):
    """Keeps only these entries; in an env, only these observations (reward, done flags and states stay).

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2), ("next", "b"): torch.zeros(2)}, [2])
    >>> list(SelectTransform("a", ("next", "b"))(batch).keys(True, True))
    ['a', ('next', 'b')]
    """

    def __init__(self, *selected_keys: NestedKey):
        super().__init__()
        self.selected_keys = selected_keys
        self._always: tuple[NestedKey, ...] = ()

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        env = self.parent
        self._always = (*DONE_KEYS, *env.done_keys, *env.reward_keys, *env._get_spec("state").leaf_keys)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.select(*self.selected_keys, *self._always, strict=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.select(*self.selected_keys, strict=False)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        keys = [key for key in observation_spec.leaf_keys if not _is_part(key, self.selected_keys)]
        return _without(observation_spec, keys)


class ExcludeTransform(Transform):
    """Drops these entries from an env's observations and a buffer's samples or, with ``inverse``, from the batches
    written to a buffer.

    >>> from tensordict import TensorDict
    >>> list(ExcludeTransform("b")(TensorDict(a=torch.zeros(2), b=torch.zeros(2))).keys())
    ['a']
    """

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False):
        super().__init__()
        self.excluded_keys, self.inverse = excluded_keys, inverse

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        env = self.parent
        needed = [key for key in (*env.done_keys, *env.reward_keys) if _is_part(key, self.excluded_keys)]
        if needed and not self.inverse:
            raise ConfigError(f"ExcludeTransform: an env needs its reward and its done flags: got {needed}.")

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self.forward(next_td)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.inverse else _left(td, self.excluded_keys)

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        return _left(td, self.excluded_keys) if self.inverse else td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        keys = [] if self.inverse else [key for key in observation_spec.leaf_keys if _is_part(key, self.excluded_keys)]
        return _without(observation_spec, keys)


class RenameTransform(EntryTransform):
    """Renames entries: ``in_keys`` become ``out_keys``. In the policy's output, ``out_keys_inv`` become
    ``in_keys_inv``, which the env reads. With ``create_copy`` the entries keep their old names too.

    Raises  ConfigError in an env for renaming a done flag, which every env must have, unless it is copied

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({("some", "key"): torch.zeros(2)}, [2])
    >>> list(RenameTransform([("some", "key")], ["renamed"])(batch).keys())
    ['renamed']
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        create_copy: bool = False,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = create_copy
        self._check_pairs()

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        if lost := [key for key in self.in_keys if key in DONE_KEYS and not self.create_copy]:
            raise ConfigError(f"RenameTransform: an env needs its done flags: got {lost}; give create_copy=True.")

    def _map_entries(self, td: TensorDictBase, strict: bool = True) -> TensorDictBase:
        super()._map_entries(td, strict)
        return self._drop(td, [key for key in self.in_keys if key not in self.out_keys])

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        return self._drop(super().inv(td), [key for key in self.out_keys_inv if key not in self.in_keys_inv])

    def _drop(self, td: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
        return td if self.create_copy else _left(td, keys)

    def _map_specs(self, spec: Composite) -> Composite:
        spec = super()._map_specs(spec)
        gone = [key for key in self.in_keys if key not in self.out_keys and not self.create_copy]
        return _without(spec, [key for key in gone if key in spec])

    transform_observation_spec = transform_reward_spec = transform_done_spec = _map_specs


class CatTensors(Transform):
    """Concatenates entries, in the given order, along ``dim`` into ``out_key``; drops the inputs if ``del_keys``.

    >>> from tensordict import TensorDict
    >>> CatTensors(["a", "b"], "ab")(TensorDict(a=torch.zeros(1), b=torch.ones(2)))["ab"]
    tensor([0., 1., 1.])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        out_key: NestedKey = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
    ):
        super().__init__(in_keys, [out_key])
        if dim >= 0:
            raise ConfigError(f"CatTensors: dim counts from the end, since batch dimensions may vary: got {dim}.")
        self.dim, self.del_keys = dim, del_keys
        self._gone = [key for key in self.in_keys if key != out_key] if del_keys else []

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self.forward(next_td)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        joined = torch.cat([required(td, key, "CatTensors") for key in self.in_keys], self.dim)
        return _left(td, self._gone).set(self.out_keys[0], joined)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        specs = [required(observation_spec, key, "CatTensors") for key in self.in_keys]
        joined = torch.cat([spec.zero() for spec in specs], self.dim)
        if all(isinstance(spec, Bounded) for spec in specs):
            low, high = (torch.cat([getattr(spec, name) for spec in specs], self.dim) for name in ("low", "high"))
            spec = Bounded(low, high, joined.shape, joined.device, joined.dtype)
        else:
            spec = Unbounded(joined.shape, joined.device, joined.dtype)
        return _without(observation_spec, self._gone).set(self.out_keys[0], spec)


class DoubleToFloat(EntryTransform):
    """Casts float64 entries to float32, and float32 actions to the float64 that the env reads. ``in_keys=None`` means
    all float64 entries; ``in_keys_inv=None`` means all float64 actions.

    >>> from tensordict import TensorDict
    >>> DoubleToFloat()(TensorDict(a=torch.zeros(1).double()))["a"].dtype
    torch.float32
    """

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self._is_general = in_keys is None, in_keys_inv is None

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        outputs, inputs = self._is_general
        if outputs:
            self.in_keys = self.out_keys = self._doubles("observation") + self._doubles("reward")
        if inputs:
            self.in_keys_inv = self.out_keys_inv = self._doubles("action")

    def _doubles(self, part: str) -> list[NestedKey]:
        spec = self.parent._get_spec(part)
        return [key for key in spec.leaf_keys if spec[key].dtype == torch.float64]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if not self._is_general[0]:
            return super().forward(td)
        for key in list(td.keys(True, True)):
            if isinstance(value := td.get(key), Tensor):
                td.set(key, self._apply_transform(value))
        return td

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.float() if value.dtype == torch.float64 else value

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.double() if value.dtype == torch.float32 else value

    def _entry_spec(self, spec: TensorSpec) -> TensorSpec:
        return spec.to(torch.float32) if spec.dtype == torch.float64 else spec


class ObservationNorm(EntryTransform):
    """Maps a value to ``value * scale + loc``; with ``standard_normal``, to ``(value - loc) / scale``. Values that a
    policy writes under ``out_keys_inv`` are mapped back.

    Raises  ConfigError if a value is mapped before ``loc`` and ``scale`` are given or measured by `init_stats`

    >>> from tensordict import TensorDict
    >>> ObservationNorm(1.0, 2.0, in_keys=["a"], standard_normal=True)(TensorDict(a=torch.tensor([5.0])))["a"]
    tensor([2.])
    """

    def __init__(
        self,
        loc: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        standard_normal: bool = False,
    ):
        super().__init__("observation" if in_keys is None else in_keys, out_keys, in_keys_inv, out_keys_inv)
        if (loc is None) != (scale is None):
            raise ConfigError("ObservationNorm: loc and scale go together: got one; without both, init_stats().")
        self.standard_normal = standard_normal
        self.loc = None if loc is None else torch.as_tensor(loc)
        self.scale = None if scale is None else torch.as_tensor(scale)

    def init_stats(self, num_iter: int, *, key: NestedKey | None = None, eps: float = 1e-6) -> None:
        """Sets ``loc`` and ``scale`` so that ``key`` (default: the only ``in_key``) has mean 0 and standard deviation 1
        over ``num_iter`` random steps of the env below. Deviations are clamped to at least ``eps``."""
        env = self.parent
        if env is None or (key is None and len(self.in_keys) != 1):
            raise ConfigError(f"ObservationNorm.init_stats: needs an env, and key=... with keys {self.in_keys}.")
        td = env.rollout(num_iter, break_when_any_done=False)
        values = required(td, self.in_keys[0] if key is None else key, "ObservationNorm.init_stats")
        values = values.flatten(0, td.batch_dims - 1)
        mean, deviation = values.mean(0), values.std(0).clamp(min=eps)
        # Both forms apply (value - mean) / deviation; value * scale + loc needs it multiplied out.
        self.loc = mean if self.standard_normal else -mean / deviation
        self.scale = deviation if self.standard_normal else 1 / deviation
        self.container.transforms_changed()

    def _apply_transform(self, value: Tensor) -> Tensor:
        return self._shifted(value, divide=self.standard_normal)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return self._shifted(value, divide=not self.standard_normal)

    def _shifted(self, value: Tensor, divide: bool) -> Tensor:
        if self.loc is None:
            raise ConfigError("ObservationNorm: loc and scale must be given, or measured by init_stats(), first.")
        loc, scale = (each.to(value.device, value.dtype) for each in (self.loc, self.scale))
        return (value - loc) / scale if divide else value * scale + loc

    def _entry_spec(self, spec: TensorSpec) -> TensorSpec:
        if not isinstance(spec, Bounded) or self.loc is None:
            return Unbounded(spec.shape, spec.device, spec.dtype)
        ends = self._apply_transform(spec.low), self._apply_transform(spec.high)  # a negative scale swaps them
        return Bounded(torch.minimum(*ends), torch.maximum(*ends), spec.shape, spec.device, spec.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.loc is None else {"loc": self.loc, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loc, self.scale = state.get("loc"), state.get("scale")


def _is_part(key: NestedKey, of: Iterable[NestedKey]) -> bool:
    """True if ``key`` is one of these keys, or nested in one."""
    path = as_key(key)
    return any(path[: len(other)] == other for other in map(as_key, of))


def _left(td: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    """Returns a shallow copy without these entries and without containers that become empty."""
    td = td.exclude(*keys)
    for key in keys:
        path = as_key(key)[:-1]
        while path and (holder := td.get(path, None)) is not None and holder.is_empty():
            td = td.exclude(path)
            path = path[:-1]
    return td


def _without(spec: Composite, keys: Iterable[NestedKey]) -> Composite:
    """Removes these keys, and composites that become empty, from the spec in place; returns it."""
    for key in keys:
        path = as_key(key)
        while path and path in spec:
            del spec[path]
            path = path[:-1]
            if path and not spec[path].is_empty():
                break
    return spec
