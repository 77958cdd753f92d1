"""`StepCounter`: counts the steps of a trajectory and truncates it at a limit."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase

from llmrl.data.specs import BoundedDiscrete, Categorical, Composite
from llmrl.envs.td_ops import required
from llmrl.envs.transforms.base import Transform
from llmrl.errors import check_at_least

__all__ = ["StepCounter"]


class StepCounter(Transform):
    """Counts the steps since the last reset and truncates a row at ``max_steps``.

    Reads   ``step_count_key``  int64[*B, 1]  of time t
    Writes  ``step_count_key``  int64[*B, 1]  0 at a reset, one more at each step
            ``truncated_key``   bool[*B, 1]   True from ``max_steps`` on, beside what the env said; only with
            ``max_steps``
            "done"              bool[*B, 1]   likewise, unless ``update_done`` is False
    Raises  ConfigError for ``max_steps`` below 1; MissingKeyError at a step whose tensordict was not made by a reset

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
