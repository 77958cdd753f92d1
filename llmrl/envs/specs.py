"""The specs of an env: observation, state, action, reward and done, set by a subclass and kept locked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from tensordict import NestedKey

from llmrl.data.specs import Categorical, Composite, TensorSpec
from llmrl.errors import ConfigError

DONE_KEYS = ("done", "terminated", "truncated")


def _spec_property(part: str, *, leaf: bool = False) -> property:
    # Looked up at each access, so that a subclass's override of _get_spec takes effect.
    def get(self: EnvSpecs) -> TensorSpec:
        spec = self._get_spec(part)
        keys = spec.leaf_keys if leaf else ()
        return spec[keys[0]] if len(keys) == 1 else spec

    def set_(self: EnvSpecs, spec: TensorSpec) -> None:
        self._set_spec(part, spec)

    what = "the leaf if there is one, else the whole `Composite`; set it with either" if leaf else "a `Composite`"
    return property(get, set_, doc=f"The {part} spec: {what}.")


def _keys_property(part: str) -> property:
    return property(lambda self: self._get_spec(part).leaf_keys, doc=f"The keys of the {part} spec's leaves.")


def _key_property(part: str) -> property:
    def get(self: EnvSpecs) -> NestedKey:
        keys = self._get_spec(part).leaf_keys
        if len(keys) != 1:
            who = f"{type(self).__name__}.{part}_key"
            raise ConfigError(f"{who}: there must be one {part}: got {list(keys)}; use {part}_keys.")
        return keys[0]

    return property(get, doc=f"The key of the {part}. Raises  ConfigError if there is not exactly one")


class EnvSpecs:
    """Stores the observation, state, action, reward and done specs, locked, with one batch size and device.

    A part that was not set is an empty `Composite`; the done spec always has ``"done"``, ``"terminated"`` and
    ``"truncated"``, bool[*B, 1].
    """

    def __init__(self, device: torch.device | str | None, batch_size: Sequence[int] | torch.Size):
        self._device = None if device is None else torch.device(device)
        self._batch_size = torch.Size(batch_size)
        self._specs: dict[str, Composite] = {}
        self._spec_version = 0

    @property
    def batch_size(self) -> torch.Size:
        return self._batch_size

    @property
    def device(self) -> torch.device | None:
        return self._device

    def to(self, device: torch.device | str) -> Self:
        """Moves the specs, in place. A subclass that has tensors moves those too."""
        self._device = torch.device(device)
        self._specs = {part: spec.to(self._device).lock_() for part, spec in self._specs.items()}
        self._spec_version += 1
        return self

    observation_spec = full_observation_spec = _spec_property("observation")
    state_spec = full_state_spec = _spec_property("state")
    done_spec = full_done_spec = _spec_property("done")
    action_spec, full_action_spec = _spec_property("action", leaf=True), _spec_property("action")
    reward_spec, full_reward_spec = _spec_property("reward", leaf=True), _spec_property("reward")

    action_keys, reward_keys, done_keys = _keys_property("action"), _keys_property("reward"), _keys_property("done")
    action_key, reward_key = _key_property("action"), _key_property("reward")

    @property
    def spec_version(self) -> int:
        """A number that changes whenever a spec is set, so that values derived from specs can be cached."""
        return self._spec_version

    def _get_spec(self, part: str) -> Composite:
        spec = self._specs.get(part)
        if spec is None:
            spec = Composite(shape=self.batch_size, device=self.device)
            if part == "done":
                spec = _with_done_keys(spec)
            self._specs[part] = spec.lock_()
        return spec

    def _set_spec(self, part: str, spec: TensorSpec) -> None:
        batch_size = self.batch_size
        if not isinstance(spec, Composite):
            if part in ("observation", "state"):
                who, got = f"{type(self).__name__}.{part}_spec", type(spec).__name__
                raise ConfigError(f"{who}: must be a Composite that names its entries: got {got}.")
            spec = Composite({part: spec}, shape=batch_size, device=spec.device)
        elif spec.shape != batch_size:
            spec = Composite(dict(spec.items()), shape=batch_size, device=spec.device)  # raises if it does not fit
        else:
            spec = spec.clone()  # the caller's spec must not be locked
        if self.device is not None:
            spec = spec.to(self.device)
        if part == "done":
            spec = _with_done_keys(spec)
        self._specs[part] = spec.lock_()
        self._spec_version += 1

    def _action_root_names(self) -> list[str]:
        return [key if isinstance(key, str) else key[0] for key in self.action_keys]


def _with_done_keys(spec: Composite) -> Composite:
    shape = spec["done"].shape if "done" in spec else torch.Size((*spec.shape, 1))
    for key in DONE_KEYS:
        if key not in spec:
            spec[key] = Categorical(2, shape=shape, dtype=torch.bool, device=spec.device)
    return spec
