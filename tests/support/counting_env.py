"""Environments whose every number is known: the observation counts the steps of a trajectory."""

from __future__ import annotations

import os
import signal
import time

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from llmrl.data import Bounded, Composite, Unbounded
from llmrl.envs import EnvBase


class CountingEnv(EnvBase):
    """The observation counts from 0 on, the reward is the count plus the action, terminated at ``limit``.

    ``fault`` happens at the step that makes the count ``at``: "raise", "hang", "kill"; at 0 it happens at the reset.
    """

    def __init__(self, limit: int = 4, batch_size: tuple[int, ...] = (), *, fault: str = "", at: int = 5, cost_s=0.0):
        super().__init__(batch_size=batch_size, batch_locked=False)
        shape = (*batch_size, 1)
        self.limit, self.fault, self.at, self.cost_s = limit, fault, at, cost_s
        self.observation_spec = Composite(observation=Unbounded(shape), shape=batch_size)
        self.action_spec = Bounded(-1.0, 1.0, shape=shape)
        self.reward_spec = Unbounded(shape)
        self.seed: int | None = None

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        batch_size = self.batch_size if td is None else td.batch_size
        self._fail(0)
        return TensorDict(observation=torch.zeros(*batch_size, 1), batch_size=batch_size)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        count = td["observation"] + 1
        self._fail(int(count.max()))
        if self.cost_s:
            time.sleep(self.cost_s)
        terminated = count >= self.limit
        return TensorDict(
            observation=count, reward=count + td["action"], terminated=terminated, batch_size=td.batch_size
        )

    def _fail(self, count: int) -> None:
        if not self.fault or count != self.at:
            return
        if self.fault == "raise":
            raise ValueError(f"the env failed at {count}")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def _set_seed(self, seed: int) -> None:
        self.seed = seed


class Scale(nn.Module):
    """The action is ``scale``, which is a parameter, for every row."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", self.scale.expand(*td.batch_size, 1))

    in_keys, out_keys = ("observation",), ("action",)
