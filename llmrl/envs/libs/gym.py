"""`GymEnv` and `GymWrapper`: gymnasium environments, by id or as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase

from llmrl.data.ragged.tensordicts import bare_tensordict, entry, new_tensordict
from llmrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from llmrl.envs.base import EnvBase
from llmrl.envs.specs import DONE_KEYS
from llmrl.errors import ConfigError, ShapeError, UnsupportedError
from llmrl.optional import require

__all__ = ["GymEnv", "GymWrapper"]

_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "Tuple")  # the spaces that have a spec


class GymWrapper(EnvBase):
    """A gymnasium environment as an `EnvBase` without batch dimensions.

    Reads   "action": discrete choices are one-hot int64[n] (for other scores the argmax is taken), or int64[] with
            ``categorical_action_encoding``, which also applies to discrete observations. `Dict` and `Tuple` action
            spaces are nested: ("action", name) and ("action", "0") and so on
    Writes  "observation"; the entries of a `Dict` space by their names, those of a `Tuple` as ("observation", "0")
            "pixels" uint8[H, W, C] with ``from_pixels``, in place of the observation unless ``pixels_only`` is False
            "reward" float32[1], summed over repeated actions; "done", "terminated", "truncated" bool[1]
    Raises  ConfigError if ``env`` is not a single gymnasium environment, and for ``from_pixels`` without
            ``render_mode="rgb_array"``; UnsupportedError for spaces without a spec

    frame_skip  every action is repeated this many times, or until the episode ends
    device      of all entries

    `set_seed` seeds the next reset, as ``reset(seed=...)`` of gymnasium does.
    """

    step_reads = ("action",)

    def __init__(
        self,
        env: Any,
        *,
        categorical_action_encoding: bool = False,
        frame_skip: int = 1,
        device: torch.device | str | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
    ):
        gymnasium = require("gymnasium", extra="gym", used_by=type(self).__name__)
        who = type(self).__name__
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(
                f"{who}: env must be a gymnasium.Env: got {type(env).__name__}; for several at a time, use "
                "SerialEnv(n, fn) or ParallelEnv(n, fn)."
            )
        if not isinstance(frame_skip, int) or frame_skip < 1:
            raise ConfigError(f"{who}: frame_skip must be an int, at least 1: got {frame_skip!r}.")
        if from_pixels:
            if env.render_mode != "rgb_array":
                raise ConfigError(
                    f"{who}: from_pixels needs an env made with render_mode='rgb_array': got {env.render_mode!r}."
                )
            env = gymnasium.wrappers.AddRenderObservation(env, render_only=pixels_only, obs_key="observation")
        super().__init__(device=device)
        self.gym_env, self.frame_skip = env, frame_skip
        self._one_hot, self._seed = not categorical_action_encoding, None
        self._specs_read: Any = (-1, None)  # (spec version, cached `_leaf_specs`)
        self._name = "pixels" if from_pixels and pixels_only else "observation"
        self._observation_space, self._action_space = env.observation_space, env.action_space
        self._is_dict = isinstance(env.observation_space, gymnasium.spaces.Dict)
        spec = self._spec_of(env.observation_space, "observation")
        self.observation_spec = spec if self._is_dict else Composite({self._name: spec})
        if taken := {*DONE_KEYS, "action", "reward", "next"} & {*self.observation_spec}:
            raise ConfigError(f"{who}: an observation cannot have the name of another entry: got {sorted(taken)}.")
        self.action_spec = Composite(action=self._spec_of(env.action_space, "action"))
        self.reward_spec = Unbounded((1,), dtype=torch.float32)

    def close(self) -> None:
        if not self.is_closed:
            self.gym_env.close()
            super().close()

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        observation, _ = self.gym_env.reset(seed=self._seed)
        self._seed = None  # for one reset only, or every episode would be the same
        return bare_tensordict(self._observed(observation), self.batch_size, self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action = _decode(entry(td, "action"), self._action_space, self._leaf_specs()[0])
        observation, reward, terminated, truncated = self._act(action)
        entries = self._observed(observation)
        device = self.device
        entries["reward"] = _tensor([reward], np.float32, device)
        for key, flag in zip(DONE_KEYS, (terminated or truncated, terminated, truncated), strict=True):
            entries[key] = _tensor([flag], np.bool_, device)
        return bare_tensordict(entries, self.batch_size, device)

    def _act(self, action: Any) -> tuple[Any, float, bool, bool]:
        reward = 0.0
        for _ in range(self.frame_skip):
            observation, one_reward, terminated, truncated, _ = self.gym_env.step(action)
            reward += float(one_reward)
            if terminated or truncated:
                break
        return observation, reward, terminated, truncated

    def _array_step(
        self, inputs: Mapping[NestedKey, np.ndarray], outputs: Mapping[NestedKey, np.ndarray]
    ) -> Callable[[], bool] | None:
        space, name = self._action_space, self._name
        is_one_hot = isinstance(self._leaf_specs()[0], OneHot)
        is_discrete = type(space).__name__ == "Discrete"
        if (
            type(self)._step is not GymWrapper._step  # overridden by a subclass
            or {*outputs} != {name, "reward", *DONE_KEYS}
            or type(self._observation_space).__name__ != "Box"
            or not (is_discrete or type(space).__name__ == "Box")
        ):
            return None
        given, observed, rewarded = inputs["action"], outputs[name], outputs["reward"]
        flags = [outputs[key] for key in DONE_KEYS]

        def step() -> bool:
            if is_discrete:
                action = int(given.argmax() if is_one_hot else given) + int(space.start)
            else:
                action = np.array(given, dtype=space.dtype)
            observation, rewarded[0], terminated, truncated = self._act(action)
            if np.shape(observation) != observed.shape:
                raise ShapeError(
                    f"{type(self).__name__}: an observation must have the shape of its space, {observed.shape}: got "
                    f"{np.shape(observation)}."
                )
            observed[...] = observation  # would silently broadcast a wrong shape, hence the check
            is_done = terminated or truncated
            for flag, value in zip(flags, (is_done, terminated, truncated), strict=True):
                flag[0] = value
            return bool(is_done)

        return step

    def _observed(self, observation: Any) -> dict[str, Any]:
        space, specs = self._observation_space, self._leaf_specs()[1]
        if self._is_dict:
            return {name: _encode(observation[name], part, specs[name]) for name, part in space.items()}
        return {self._name: _encode(observation, space, specs[self._name])}

    def _leaf_specs(self) -> tuple[TensorSpec, dict[str, TensorSpec]]:
        """Returns the specs of action and observations, cached: a lookup at every step would double its cost."""
        if self._specs_read[0] != self.spec_version:
            found = self._get_spec("action")["action"], dict(self._get_spec("observation").items())
            self._specs_read = self.spec_version, found
        return self._specs_read[1]

    def _spec_of(self, space: Any, what: str) -> TensorSpec:
        """Returns the spec of a space."""
        kind, device = _kind(type(space)), self.device
        if kind == "Box":
            dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
            if np.isinf(space.low).all() and np.isinf(space.high).all():
                return Unbounded(space.shape, device, dtype)
            return Bounded(torch.from_numpy(space.low), torch.from_numpy(space.high), space.shape, device, dtype)
        if kind == "Discrete":
            n = int(space.n)
            return OneHot(n, device=device, dtype=torch.int64) if self._one_hot else Categorical(n, device=device)
        if kind == "MultiDiscrete" and space.nvec.ndim == 1:
            if self._one_hot:
                return MultiOneHot(space.nvec.tolist(), device=device, dtype=torch.int64)
            return MultiCategorical(space.nvec.tolist(), device=device, remove_singleton=False)
        if kind == "MultiBinary":
            return Binary(shape=space.shape, device=device)
        if kind == "Text":
            return NonTensor((), device, example_data="")
        if kind in ("Dict", "Tuple"):
            return Composite({name: self._spec_of(part, what) for name, part in _parts(space)}, device=device)
        raise UnsupportedError(
            f"{type(self).__name__}: the {what} space must be a Box, Discrete, MultiDiscrete of one dimension, "
            f"MultiBinary or Text, or a Dict or Tuple of those: got {space}."
        )


class GymEnv(GymWrapper):
    """``GymWrapper(gymnasium.make(env_name, **kwargs))``, plus the options of `GymWrapper`.

    ``from_pixels`` makes the environment with ``render_mode="rgb_array"``.

    >>> env = GymEnv("CartPole-v1")
    >>> env.set_seed(0)
    3793791033
    >>> env.rollout(3)["action"].shape, env.reset()["observation"].shape
    (torch.Size([3, 2]), torch.Size([4]))
    """

    def __init__(
        self,
        env_name: str,
        *,
        categorical_action_encoding: bool = False,
        frame_skip: int = 1,
        device: torch.device | str | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        **kwargs: Any,
    ):
        gymnasium = require("gymnasium", extra="gym", used_by="GymEnv")
        if from_pixels:
            kwargs.setdefault("render_mode", "rgb_array")
        try:
            env = gymnasium.make(env_name, **kwargs)
        except gymnasium.error.Error as error:
            raise ConfigError(f"GymEnv: gymnasium must be able to make {env_name!r}: {error}") from error
        self.env_name = env_name
        super().__init__(
            env,
            categorical_action_encoding=categorical_action_encoding,
            frame_skip=frame_skip,
            device=device,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
        )

    def __repr__(self) -> str:
        return f"GymEnv({self.env_name}, device={self.device})"


def _parts(space: Any) -> list[tuple[str, Any]]:
    """Returns the spaces of a Dict or Tuple by name."""
    if _kind(type(space)) == "Dict":
        return list(space.items())
    return [(str(number), part) for number, part in enumerate(space)]


@cache
def _kind(space_type: type) -> str:
    """The name of the gymnasium space that a class is or inherits from; its own name if there is none."""
    return next((base.__name__ for base in space_type.__mro__ if base.__name__ in _KINDS), space_type.__name__)


def _encode(value: Any, space: Any, spec: TensorSpec) -> Any:
    """Converts an observation to an entry, always a copy: some environments reuse the array that they return."""
    kind = _kind(type(space))
    if kind == "Box":
        return _tensor(value, space.dtype, spec.device)
    if kind in ("Dict", "Tuple"):
        values = value if kind == "Dict" else {str(number): part for number, part in enumerate(value)}
        entries = {name: _encode(values[name], part, spec[name]) for name, part in _parts(space)}
        return new_tensordict(entries, device=spec.device)
    return spec.encode(value - space.start if kind in ("Discrete", "MultiDiscrete") else value)


def _decode(value: Any, space: Any, spec: TensorSpec) -> Any:
    """Converts an action entry to the form that gymnasium expects."""
    kind = _kind(type(space))
    if kind in ("Dict", "Tuple"):
        values = {name: _decode(value.get(name), part, spec[name]) for name, part in _parts(space)}
        return values if kind == "Dict" else tuple(values.values())
    if kind == "Discrete":
        # Instead of a one-hot vector the policy may write scores, such as logits: the argmax is taken.
        number = value.argmax(-1) if isinstance(spec, OneHot) and value.dtype != torch.bool else spec.to_numpy(value)
        return int(number.item() + space.start)
    number = spec.to_numpy(value)
    if kind == "MultiDiscrete":
        return number + space.start
    return number if kind == "Text" else np.array(number, dtype=space.dtype)


def _tensor(value: Any, dtype: Any, device: torch.device | None) -> torch.Tensor:
    """Copies ``value`` to a tensor; via numpy this takes a third of the time of ``torch.tensor``."""
    tensor = torch.from_numpy(np.array(value, dtype=dtype))
    return tensor if device is None or device.type == "cpu" else tensor.to(device)
