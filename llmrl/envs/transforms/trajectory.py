"""Transforms that track a trajectory: mark its start, count steps, sum rewards, carry the policy's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from llmrl.data.ragged.tensordicts import required
from llmrl.data.specs import BoundedDiscrete, Categorical, Composite, TensorSpec, Unbounded
from llmrl.envs.transforms.base import Keys, Transform
from llmrl.errors import ConfigError, check_at_least


class InitTracker(Transform):
    """Marks the first step of each trajectory.

    Writes  ``init_key`` bool[*B, 1]: True at a reset, False at t+1

    >>> InitTracker(init_key="is_first").init_key
    'is_first'
    """

    def __init__(self, init_key: NestedKey = "is_init"):
        super().__init__(in_keys=[], out_keys=[init_key])
        self.init_key = init_key

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        return self._mark(reset_td, True)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._mark(next_td, False)

    def _mark(self, td: TensorDictBase, value: bool) -> TensorDictBase:
        return td.set(self.init_key, torch.full((*td.batch_size, 1), value, device=td.device))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        spec = Categorical(2, (*observation_spec.shape, 1), device=observation_spec.device, dtype=torch.bool)
        return observation_spec.set(self.init_key, spec)


class RewardSum(Transform):
    """Sums the rewards of a trajectory.

    Writes  ``out_keys``, by default "episode_reward": 0 at a reset, at t+1 its value of time t plus the reward. In a
            batch [*B, T], time last, the same under "next"; the sum restarts at 0 after each ("next", "done")

    >>> from tensordict import TensorDict
    >>> next_td = TensorDict(reward=torch.ones(3, 1), done=torch.tensor([[False], [True], [False]]), batch_size=[3])
    >>> RewardSum()(TensorDict(next=next_td, batch_size=[3]))["next", "episode_reward"].flatten()
    tensor([1., 2., 1.])
    """

    def __init__(self, in_keys: Keys | None = None, out_keys: Keys | None = None):
        in_keys = "reward" if in_keys is None else in_keys
        if out_keys is None and in_keys in ("reward", ["reward"]):
            out_keys = "episode_reward"
        super().__init__(in_keys, out_keys)
        if self.in_keys == self.out_keys:
            raise ConfigError(f"RewardSum: out_keys must name where the sums go: got {self.out_keys}.")
        self._check_pairs()

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        env = self.parent
        rewards = env._get_spec("reward")
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys):
            spec = rewards[in_key]
            shape = (*reset_td.batch_size, *spec.shape[len(env.batch_size) :])
            reset_td.set(out_key, torch.zeros(shape, dtype=spec.dtype, device=reset_td.device))
        return reset_td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys):
            before = required(td, out_key, "RewardSum", "step a tensordict that env.reset() returned")
            next_td.set(out_key, before + required(next_td, in_key, "RewardSum"))
        return next_td

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        done = required(td, ("next", "done"), "RewardSum")
        time = td.batch_dims - 1
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys):
            # Step by step, because sums restart at each done; the order of additions is that of an env.
            sums: list[Tensor] = []
            rewards = required(td, unravel_key(("next", in_key)), "RewardSum").unbind(time)
            for reward, ended in zip(rewards, [None, *done.unbind(time)[:-1]], strict=True):
                sums.append(reward if ended is None else reward + sums[-1] * ~ended)
            td.set(unravel_key(("next", out_key)), torch.stack(sums, time))
        return td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        rewards = self.parent._get_spec("reward")
        for in_key, out_key in self._pairs(self.in_keys, self.out_keys):
            spec = required(rewards, in_key, "RewardSum")
            observation_spec[out_key] = Unbounded(spec.shape, spec.device, spec.dtype)
        return observation_spec


class TensorDictPrimer(Transform):
    """Adds entries at a reset that later steps carry along, such as a recurrent policy's hidden state.

    primers        the spec of each entry for one row; also by keyword. A `Composite` may have the shape of the env
    random         draws the values from the specs; by default they are ``default_value``
    default_value  a number, a function that gets the batch size, or a mapping of those by key; default: the spec's zero

    At t+1 an entry is what the policy wrote under "next", else its value at t. Buffer samples get missing entries.

    >>> from llmrl.envs import GymEnv
    >>> env = GymEnv("CartPole-v1").append_transform(TensorDictPrimer(hidden=Unbounded((3,))))
    >>> env.rollout(2)["hidden"].shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        primers: Mapping[str, TensorSpec] | Composite | None = None,
        random: bool = False,
        default_value: Any = None,
        **named: TensorSpec,
    ):
        super().__init__(in_keys=[])
        specs = primers if isinstance(primers, Composite) else Composite({**(primers or {}), **named})
        if isinstance(primers, Composite) and named:
            raise ConfigError(f"TensorDictPrimer: give a Composite or keywords: got both, {', '.join(named)}.")
        specs = specs[(0,) * len(specs.shape)] if specs.shape else specs  # for one row: a reset may start any number
        self.primers = {key: specs[key] for key in specs.leaf_keys}
        if random and default_value is not None:
            raise ConfigError("TensorDictPrimer: random values and a default_value exclude each other: got both.")
        if not self.primers:
            raise ConfigError("TensorDictPrimer: needs the spec of at least one entry.")
        self.random, self.default_value = random, default_value
        self.out_keys = list(self.primers)
        self._generator: torch.Generator | None = None

    def _set_seed(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        for key, spec in self.primers.items():
            reset_td.set(key, self._value(key, spec, reset_td))
        return reset_td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for key in self.primers:
            if next_td.get(key, None) is None:
                written = td.get(unravel_key(("next", key)), None)  # by the policy, before the env's step
                next_td.set(key, required(td, key, "TensorDictPrimer") if written is None else written)
        return next_td

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        for key, spec in self.primers.items():
            if td.get(key, None) is None:
                td.set(key, self._value(key, spec, td))
        return td

    def _value(self, key: NestedKey, spec: TensorSpec, td: TensorDictBase) -> Any:
        if self.random:
            value = spec.rand(td.batch_size, generator=self._generator)
        else:
            value = spec.zero(td.batch_size)
            given = self.default_value.get(key) if isinstance(self.default_value, Mapping) else self.default_value
            if isinstance(given, Callable):
                value = given(td.batch_size)
            elif given is not None:
                value = torch.full_like(value, given)
        return value if td.device is None else value.to(td.device)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for key, spec in self.primers.items():
            spec = spec if observation_spec.device is None else spec.to(observation_spec.device)
            observation_spec[key] = spec.expand(*observation_spec.shape, *spec.shape)
        return observation_spec


class StepCounter(Transform):
    """Counts the steps since the last reset and truncates a row at ``max_steps``.

    Reads   ``step_count_key``  int64[*B, 1]  of time t
    Writes  ``step_count_key``  int64[*B, 1]  0 at a reset, plus 1 at each step
            ``truncated_key``   bool[*B, 1]   True from ``max_steps`` on, or if the env truncates; only with
            ``max_steps``
            "done"              bool[*B, 1]   likewise, unless ``update_done`` is False
    Raises  ConfigError for ``max_steps`` below 1; MissingKeyError at a step whose tensordict does not come from a reset

    >>> StepCounter(max_steps=3)
    StepCounter(max_steps=3)
    """

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: NestedKey = "step_count",
        update_done: bool = True,
    ):
        check_at_least("StepCounter", 1, max_steps=max_steps)
        super().__init__()
        self.max_steps = max_steps
        self.truncated_key = truncated_key
        self.step_count_key = step_count_key
        self.update_done = update_done

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        shape = (*reset_td.batch_size, 1)
        reset_td.set(self.step_count_key, torch.zeros(shape, dtype=torch.int64, device=reset_td.device))
        if self.max_steps is not None and reset_td.get(self.truncated_key, None) is None:
            reset_td.set(self.truncated_key, torch.zeros(shape, dtype=torch.bool, device=reset_td.device))
        return reset_td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        count = required(td, self.step_count_key, "StepCounter", "step a tensordict that env.reset() returned") + 1
        next_td.set(self.step_count_key, count)
        if self.max_steps is not None:
            reached = count >= self.max_steps
            truncated = next_td.get(self.truncated_key, None)
            next_td.set(self.truncated_key, reached if truncated is None else truncated | reached)
            if self.update_done:
                next_td.set("done", next_td.get("done") | reached)
        return next_td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape, limit = (*observation_spec.shape, 1), torch.iinfo(torch.int64).max
        spec = BoundedDiscrete(0, limit, shape=shape, dtype=torch.int64, device=observation_spec.device)
        return observation_spec.set(self.step_count_key, spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        if self.max_steps is not None and self.truncated_key not in done_spec:
            shape = (*done_spec.shape, 1)
            done_spec[self.truncated_key] = Categorical(2, shape=shape, dtype=torch.bool, device=done_spec.device)
        return done_spec

    def __repr__(self) -> str:
        return f"StepCounter(max_steps={self.max_steps})"


def at_last_step(env: Any, td: TensorDictBase) -> Tensor:
    """Rows of time t that a `StepCounter` of ``env`` ends with this step, bool[B]; of no env: none."""
    ends_B = torch.zeros(td.batch_size.numel(), dtype=torch.bool, device=td.device)
    for counter in () if env is None else env.transform.leaves():
        if isinstance(counter, StepCounter) and counter.max_steps is not None:
            ends_B = ends_B | (td.get(counter.step_count_key).flatten() + 1 >= counter.max_steps)
    return ends_B
