"""`Transform`, the extension point of environments and replay buffers, and `Compose`, a list of transforms.

A transform overrides one hook, rarely two. Transforms run in the order they were appended; ``inv`` runs in reverse
order, because an action (or a batch written to a buffer) enters through the outermost transform.

| hook | runs in | sees | override it to |
|---|---|---|---|
| ``_apply_transform(value)`` | default of ``_call`` and ``forward``, per key pair | one entry | map a value |
| ``_call(next_td)`` | reset and step | t+1 | derive an entry from the new state |
| ``_step(td, next_td)`` | step (default: ``_call(next_td)``) | t and t+1 | reward, tools, done |
| ``_reset(td, reset_td)`` | reset, after the env (default: ``_call``) | the input of reset, t = 0 | counters |
| ``_reset_env_preprocess(td)`` | reset, before the env | the input of reset, or None | give the env its prompts |
| ``forward(td)`` | buffer sample | a batch | relabel, pad |
| ``inv(td)`` | buffer extend; before the env's step | a batch | group (may return None), decode an action |
| ``_inv_apply_transform(value)`` | default of ``inv``, per inverse key pair | one entry | map an action |
| ``transform_<part>_spec(spec)`` | once, when specs are read | a copy of the `Composite` | declare new entries |
| ``set_container(env)`` | once, when attached | the env | read ``self.parent`` |
| ``_set_seed``, ``state_dict``, ``load_state_dict``, ``close`` | with the env's | | manage a cursor, a process |

Rules: ``td`` (time t) is the caller's and must not be changed; ``next_td`` and ``reset_td`` are changed in place and
returned. A partial reset runs the same hooks on the reset rows only (a `batch_locked` env runs them on all rows and
then restores the others), so hooks never handle a mask. `TransformedEnv` runs the hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from tensordict import NestedKey, TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import required
from llmrl.data.specs import Composite
from llmrl.envs.specs import EnvSpecs
from llmrl.envs.td_ops import shallow_copy
from llmrl.errors import ConfigError, did_you_mean

Keys = NestedKey | Sequence[NestedKey]


class Transform:
    """Changes data on the way into and out of an env or a replay buffer; the base class changes nothing.

    Reads   ``in_keys`` (of t+1, or of a batch), ``out_keys_inv`` (what the policy writes)
    Writes  ``out_keys`` (default: ``in_keys``), ``in_keys_inv`` (what the env reads). With ``in_keys=[]`` nothing is
            mapped: ``out_keys`` then names the entries that a hook of the subclass writes
    Raises  MissingKeyError if an entry of ``in_keys`` is absent at a step; at a reset, absent entries are skipped

    >>> import torch
    >>> from tensordict import TensorDict
    >>> class Negate(Transform):
    ...     def _apply_transform(self, value):
    ...         return -value
    >>> Negate(in_keys=["reward"])(TensorDict(reward=torch.ones(2, 1), batch_size=[2]))["reward"].flatten()
    tensor([-1., -1.])
    """

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ):
        self.in_keys = _as_keys(in_keys)
        self.out_keys = self.in_keys if out_keys is None else _as_keys(out_keys)
        self.in_keys_inv = _as_keys(in_keys_inv)
        self.out_keys_inv = self.in_keys_inv if out_keys_inv is None else _as_keys(out_keys_inv)
        self.container: EnvSpecs | None = None  # the env that it is in; None in a buffer or standalone

    # -- one entry -----------------------------------------------------------------------------------------------------

    def _apply_transform(self, value: Any) -> Any:
        return value

    _inv_apply_transform = _apply_transform

    # -- in an env -----------------------------------------------------------------------------------------------------

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self._map_entries(next_td)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._call(next_td)

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        if type(self)._call is Transform._call:  # an overridden _call handles missing entries itself
            return self._map_entries(reset_td, strict=False)  # at a reset there is no reward, for example
        return self._call(reset_td)

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase | None:
        return td

    def _set_seed(self, seed: int) -> None:
        pass

    def close(self) -> None:
        pass

    # -- in a buffer, and for actions ----------------------------------------------------------------------------------

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return self._map_entries(td)

    def __call__(self, td: TensorDictBase | None = None, /, **entries: Any) -> Any:
        """Runs `forward` on a batch; or on ``entries``, the values of ``in_keys`` by name (parts of a nested key joined
        by "_"): then returns the values of ``out_keys``."""
        if td is not None and not entries:
            return self.forward(td)
        keys = {key if isinstance(key, str) else "_".join(key): key for key in self.in_keys}
        unknown = [name for name in entries if name not in keys]
        if td is not None or unknown:
            raise TypeError(
                f"{type(self).__name__}: takes one tensordict, or {', '.join(keys) or 'nothing'} by name: got "
                f"{', '.join(unknown or entries)}.{did_you_mean(unknown[0], keys) if unknown else ''}"
            )
        td = self.forward(TensorDict({keys[name]: value for name, value in entries.items()}).auto_batch_size_(1))
        values = tuple(td.get(key) for key in self.out_keys)
        return values[0] if len(values) == 1 else values

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if not self.in_keys_inv:
            return td
        td = shallow_copy(td)  # the policy's tensordict must keep its action
        for in_key, out_key in self._pairs(self.in_keys_inv, self.out_keys_inv):
            if (value := td.get(out_key, None)) is not None:
                td.set(in_key, self._inv_apply_transform(value))
        return td

    # -- specs: each gets a copy that it may change and return ---------------------------------------------------------

    def _same_spec(self, spec: Composite) -> Composite:
        return spec

    transform_observation_spec = transform_state_spec = transform_action_spec = _same_spec
    transform_reward_spec = transform_done_spec = _same_spec

    # -- container and parent ------------------------------------------------------------------------------------------

    @property
    def parent(self) -> EnvSpecs | None:
        """The env below this transform: the base env with the transforms before this one. None if unattached.

        Built at each access: read it once, in ``set_container``, not at every step.
        """
        return None if self.container is None else self.container.env_below(self)

    def set_container(self, container: EnvSpecs) -> None:
        """Called when the transform is added to an env. Raises ConfigError if it is already in another one."""
        if self.container is not None and self.container is not container:
            raise ConfigError(
                f"{type(self).__name__}: a transform belongs to one env at a time and this one is in a "
                f"{type(self.container).__name__} already; append transform.clone() instead."
            )
        self.container = container

    def reset_container(self) -> None:
        """Called when the transform is removed from its env."""
        self.container = None

    def clone(self) -> Self:
        """Returns a shallow copy that is not attached to an env."""
        other = copy.copy(self)
        other.container = None
        return other

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ConfigError(f"{type(self).__name__}: keeps no state, but was given {', '.join(state)} to load.")

    def __repr__(self) -> str:
        keys = f"in_keys={self.in_keys}, out_keys={self.out_keys}" if self.in_keys or self.out_keys else ""
        return f"{type(self).__name__}({keys})"

    def _map_entries(self, td: TensorDictBase, strict: bool = True) -> TensorDictBase:
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys) if self.in_keys else ():
            value = required(td, in_key, type(self).__name__) if strict else td.get(in_key, None)
            if value is not None:
                td.set(out_key, self._apply_transform(value))
        return td

    def _check_pairs(self) -> None:
        self._pairs(self.in_keys, self.out_keys)
        self._pairs(self.in_keys_inv, self.out_keys_inv)

    def _pairs(self, in_keys: list[NestedKey], out_keys: list[NestedKey]) -> Iterator[tuple[NestedKey, NestedKey]]:
        if len(in_keys) != len(out_keys):
            raise ConfigError(
                f"{type(self).__name__}: needs one key to write per key that it reads, unless it overrides the hook: "
                f"got {in_keys} and {out_keys}."
            )
        return zip(in_keys, out_keys, strict=True)


def innermost(env: EnvSpecs) -> EnvSpecs:
    """Returns the base env, without the transforms around it."""
    while (inner := getattr(env, "base_env", None)) is not None:
        env = inner
    return env


_DUE = {"_call": "next_td", "_step": "next_td", "_reset": "reset_td", "forward": "td"}


def _each_in_turn(hook: str) -> Callable[..., Any]:
    """Returns a `Compose` method that passes its last argument through ``hook`` of every member."""

    def run(self: Compose, *arguments: Any) -> Any:
        *before, value = arguments
        for transform in self.transforms:
            value = getattr(transform, hook)(*before, value)
            if value is None:
                who, due = f"{type(transform).__name__}.{hook}", _DUE.get(hook, "spec")
                raise ConfigError(f"{who}: must return {due}, got None; is a return missing?")
        return value

    return run


class Compose(Transform):
    """Several transforms as one: they run in the order given, their ``inv`` in reverse.

    Raises  ConfigError for a member that is not a `Transform`, or that returned None instead of a tensordict

    >>> compose = Compose(Transform(), Transform(in_keys=["observation"]))
    >>> len(compose), compose[1].in_keys
    (2, ['observation'])
    """

    def __init__(self, *transforms: Transform):
        super().__init__()
        self.transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform) -> None:
        self.insert(len(self), transform)

    def insert(self, index: int, transform: Transform) -> None:
        if not isinstance(transform, Transform):
            raise ConfigError(f"Compose: a member must be a Transform: got {transform!r}.")
        if transform is self or any(transform is leaf for leaf in self.leaves()):
            raise ConfigError(f"Compose: {transform!r} is already in it; insert transform.clone() to run it twice.")
        self.transforms.insert(index, transform)  # before set_container: `parent` depends on the position
        try:
            if self.container is not None:
                transform.set_container(self.container)
        except Exception:  # set_container failed, possibly half-way
            self.transforms.remove(transform)
            if transform.container is self.container:
                transform.reset_container()
            raise
        finally:
            self._members_changed()

    def pop(self, index: int = -1) -> Transform:
        """Removes and detaches a member. Raises ConfigError if there is none at ``index``."""
        if not -len(self.transforms) <= index < len(self.transforms):
            raise ConfigError(f"Compose.pop: there must be a transform at {index}: got {len(self.transforms)} of them.")
        transform = self.transforms.pop(index)
        if transform.container is self.container:  # False for a slice of an env's transforms: the env keeps the member
            transform.reset_container()
        self._members_changed()
        return transform

    def _members_changed(self) -> None:
        if self.container is not None:
            self.container.transforms_changed()

    def reset_container(self) -> None:
        for transform in self.transforms:
            if transform.container is self.container:  # a member that failed to attach may belong to another env
                transform.reset_container()
        super().reset_container()

    def leaves(self) -> Iterator[Transform]:
        """Yields every transform in running order, including members of nested `Compose`."""
        for transform in self.transforms:
            if isinstance(transform, Compose):
                yield from transform.leaves()
            else:
                yield transform

    def __getitem__(self, index: int | slice) -> Transform | Compose:
        """Returns a member; for a slice, an unattached `Compose` over the same members."""
        if not isinstance(index, slice):
            return self.transforms[index]
        part = Compose()
        part.transforms = self.transforms[index]
        return part

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"

    _call = _each_in_turn("_call")
    forward = _each_in_turn("forward")
    _step = _each_in_turn("_step")
    _reset = _each_in_turn("_reset")

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase | None:
        for transform in self.transforms:
            td = transform._reset_env_preprocess(td)
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        for transform in reversed(self.transforms):
            td = transform.inv(td)
            if td is None:
                return None
        return td

    transform_observation_spec = _each_in_turn("transform_observation_spec")
    transform_state_spec = _each_in_turn("transform_state_spec")
    transform_action_spec = _each_in_turn("transform_action_spec")
    transform_reward_spec = _each_in_turn("transform_reward_spec")
    transform_done_spec = _each_in_turn("transform_done_spec")

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        for transform in self.transforms:
            transform.set_container(container)

    def clone(self) -> Self:
        other = super().clone()
        other.transforms = [transform.clone() for transform in self.transforms]
        return other

    def state_dict(self) -> dict[str, Any]:
        return {str(index): transform.state_dict() for index, transform in enumerate(self.transforms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {str(index) for index in range(len(self.transforms))}:
            due = len(self.transforms)
            raise ConfigError(f"Compose: the state must have one entry per transform: got {len(state)}, not {due}.")
        for index, transform in enumerate(self.transforms):
            transform.load_state_dict(state[str(index)])

    def close(self) -> None:
        for transform in self.transforms:
            transform.close()

    def _set_seed(self, seed: int) -> None:
        for transform in self.transforms:
            transform._set_seed(seed)


def _as_keys(keys: Keys | None) -> list[NestedKey]:
    if keys is None:
        return []
    return [keys] if isinstance(keys, (str, tuple)) else list(keys)
