"""`ScoringTransform`: what transforms that score a turn have in common, in an environment and in a replay buffer.

What is scored, and how, is a subclass's part: `answers`, `ifeval`, the reward and length transforms.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from llmrl.envs.specs import DONE_KEYS
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform

__all__ = ["ScoringTransform"]


class ScoringTransform(Transform):
    """Scores each turn of an env, by `_step`; as a buffer's transform, or called, each batch that was collected.

    A batch gets the same entries in ``next``, and rewards are added to those that it has. Where conversations end is
    left as it was: that is over.

    >>> import torch
    >>> class Constant(ScoringTransform):
    ...     def _step(self, td, next_td):
    ...         return next_td.set("reward", torch.ones(*td.batch_size, 1, 1))
    >>> Constant()(TensorDict(batch_size=[2]))["next", "reward"].shape
    torch.Size([2, 1, 1])
    """

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        before = td.get("next", None)
        if before is None:
            before = TensorDict({}, batch_size=td.batch_size, device=td.device)
        scored = self._step(td, shallow_copy(before))
        ends = {key: before.get(key) for key in DONE_KEYS if key in before.keys()}
        td.set("next", scored.exclude(*DONE_KEYS).update(ends))
        return td
