"""`TransformedEnv`: an env with transforms around it. The hooks of a transform are listed in `base`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.data.specs import Composite
from llmrl.envs.base import EnvBase
from llmrl.envs.transforms.base import Compose, Transform
from llmrl.errors import ConfigError, did_you_mean


class TransformedEnv(EnvBase):
    """An env whose inputs, outputs and specs pass through ``transform`` (always a `Compose`, empty if none is given).

    Calls   at step:  ``transform.inv(td)``, the base env, ``transform._step(td, next_td)``
            at reset: ``transform._reset_env_preprocess(td)``, the base env, ``transform._reset(td, reset_td)``
    Raises  ConfigError for a transform that is in another env; AttributeError for a name that neither env has

    Batch size, device and locking are the base env's. Public attributes that it lacks are looked up in the base env.
    """

    def __init__(self, env: EnvBase, transform: Transform | None = None):
        if not isinstance(env, EnvBase):
            raise ConfigError(f"TransformedEnv: env must be an EnvBase: got {type(env).__name__}.")
        self.base_env = env
        super().__init__(device=env.device, batch_size=env.batch_size, batch_locked=env.batch_locked)
        self._spec_cache: dict[str, tuple[int, Composite]] = {}
        given = () if transform is None else (transform,)
        self.transform = transform if isinstance(transform, Compose) else Compose(*given)
        self.transform.set_container(self)

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Adds ``transform`` after the others, in place. Returns self."""
        return self.insert_transform(len(self.transform), transform)

    def insert_transform(self, index: int, transform: Transform) -> TransformedEnv:
        """Adds ``transform`` before the one at ``index``, in place. Returns self."""
        self.transform.insert(index, transform)
        return self

    def transforms_changed(self) -> None:
        """Invalidates the cached specs; they are rebuilt on next use."""
        self._spec_cache.clear()
        self._spec_version += 1

    def env_below(self, transform: Transform) -> EnvBase:
        """Returns the env that ``transform`` wraps: the base env with the transforms before it, still attached here."""
        units = [] if transform is self.transform else _units(self.transform, transform)
        before = list(itertools.takewhile(lambda unit: unit is not transform, units))
        if not before:
            return self.base_env
        env = TransformedEnv(self.base_env)
        env.transform.transforms = before  # set directly: append() rejects transforms of another env
        return env

    @property
    def device(self) -> torch.device | None:
        return self.base_env.device

    def to(self, device: torch.device | str) -> TransformedEnv:
        self.base_env.to(device)
        self._spec_cache.clear()
        return self

    def close(self) -> None:
        if not self.is_closed:
            self.transform.close()
            self.base_env.close()
            super().close()

    def state_dict(self) -> dict[str, Any]:
        return {"base_env": self.base_env.state_dict(), "transform": self.transform.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base_env.load_state_dict(state["base_env"])
        self.transform.load_state_dict(state["transform"])

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        inner_td = self.transform.inv(td)
        if inner_td is None:
            raise ConfigError(
                f"{type(self).__name__}: transform.inv must return a tensordict in an env: got None from "
                f"{self.transform!r}; a transform that holds rows back belongs in a replay buffer."
            )
        return self.transform._step(td, self.base_env._transition(inner_td))

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        td = self.transform._reset_env_preprocess(td)
        reset_td = self.base_env._start(td)
        if td is None:
            td = new_tensordict({}, reset_td.batch_size)
        return self.transform._reset(td, reset_td)

    def _blank(self, old: TensorDictBase, new: TensorDictBase) -> None:
        self.base_env._blank(old, new)

    def _continue_randomly(self, td: TensorDictBase, generator: torch.Generator | None) -> bool:
        same = self.action_keys == self.base_env.action_keys  # else a transform computes the base env's action
        return same and self.base_env._continue_randomly(td, generator)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        super().set_seed(seed)
        return self.base_env.set_seed(seed, static_seed)

    def _set_seed(self, seed: int) -> None:
        self.transform._set_seed(seed)

    def _get_spec(self, part: str) -> Composite:
        version = self.spec_version  # changes also when a spec of the base env is set
        cached = self._spec_cache.get(part)
        if cached is None or cached[0] != version:
            hook: Callable[[Composite], Composite] = getattr(self.transform, f"transform_{part}_spec")
            cached = (version, hook(self.base_env._get_spec(part).clone()).lock_())
            self._spec_cache[part] = cached
        return cached[1]

    def _set_spec(self, part: str, spec: Composite) -> None:
        raise ConfigError(
            f"{type(self).__name__}: its specs follow from the base env and the transforms; set {part}_spec on "
            f"base_env, or declare it in a transform's transform_{part}_spec."
        )

    @property
    def spec_version(self) -> int:
        return self._spec_version + self.base_env.spec_version

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails. Private names are never forwarded, so a half-built object cannot
        # recurse.
        if name.startswith("_") or name == "base_env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        try:
            return getattr(self.base_env, name)
        except AttributeError:
            known = {*dir(type(self)), *dir(self.base_env), *vars(self)}
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, and neither has its base env, "
                f"{type(self.base_env).__name__}.{did_you_mean(name, known)}"
            ) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.base_env!r}, transform={self.transform!r})"


def _units(compose: Compose, wanted: Transform) -> list[Transform]:
    # Members in running order; a nested Compose counts as one unless the wanted transform lies inside it.
    units: list[Transform] = []
    for transform in compose:
        inside = isinstance(transform, Compose) and transform is not wanted
        units.extend(_units(transform, wanted) if inside else [transform])
    return units
