"""Records, for every turn, the version of the weights that sampled it. The collector increments the version."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import column
from llmrl.data.specs import Composite, NonTensor, Unbounded
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError


class PolicyVersion(Transform):
    """Writes the policy version of the turn.

    Writes  "policy_version"  int64[B], or NonTensor str [B] for ``version_type="uuid"``, at reset and step: the version
            that samples next. A wrapper overwrites it with its engine's version when it samples, so the stored version
            is the one that was used
    Raises  ConfigError for an unknown ``version_type``

    Integers start at 0 and increase by one per weight update; each update draws a new uuid.

    >>> tracker = PolicyVersion()
    >>> tracker.increment_version()
    >>> tracker.version, tracker.version_history
    (1, [0, 1])
    """

    def __init__(self, version_type: type[int] | Literal["int", "uuid"] = int):
        super().__init__()
        if version_type not in (int, "int", "uuid"):
            raise ConfigError(f"PolicyVersion: version_type must be int or 'uuid': got {version_type!r}.")
        self.version_type: Literal["int", "uuid"] = "uuid" if version_type == "uuid" else "int"
        self.version: int | str = self._first()
        self.version_history: list[int | str] = [self.version]

    def increment_version(self) -> None:
        """Moves to the next version. Called once per weight update, after the new weights are loaded."""
        self.set_version(self.version + 1 if isinstance(self.version, int) else self._first())

    def set_version(self, version: int | str) -> None:
        """Sets the version that came with the weights."""
        self.version = version
        self.version_history.append(version)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "version_history": list(self.version_history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self.version_history = list(state["version_history"])

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        count = next_td.batch_size[0]
        if isinstance(self.version, int):
            next_td.set("policy_version", torch.full((count,), self.version, device=next_td.device))
        else:
            next_td.set("policy_version", column([self.version] * count))
        return next_td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape, device = observation_spec.shape, observation_spec.device
        observation_spec["policy_version"] = (
            Unbounded(shape=shape, dtype=torch.int64, device=device)
            if self.version_type == "int"
            else NonTensor(shape=shape, example_data="")
        )
        return observation_spec

    def _first(self) -> int | str:
        return 0 if self.version_type == "int" else str(uuid.uuid4())
