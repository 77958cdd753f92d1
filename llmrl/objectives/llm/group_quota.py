"""Keeps a step to its number of groups when rollouts are collected until there are enough that teach something.

Which groups teach something is `MCAdvantage`'s to say; how often more are collected is the recipe's.
"""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase

from llmrl.envs.transforms.base import Transform
from llmrl.errors import MissingKeyError

__all__ = ["GroupQuota"]


class GroupQuota(Transform):
    """Lets at most ``num_groups`` groups into a buffer until `reset`; looping over ``missing`` is dynamic sampling.

    Reads   "group_id"  int64[B]; the rows of a group come in one batch, as `MCAdvantage` writes them
    Returns from ``inv``: the rows of the first groups, or None if there is no place for any
    Raises  MissingKeyError for a batch without groups

    Writes into a buffer meet the last transform first, so that it stands before the one that makes groups:
    ``ReplayBuffer(transform=Compose(quota, MCAdvantage(8, on_zero_variance="drop")))``. Surplus groups are left out and
    counted; kept for the next step they would be by older weights. Source: DAPO (arXiv:2503.14476), section 3.2.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> quota = GroupQuota(2)
    >>> quota.inv(TensorDict(group_id=torch.tensor([3, 3]), batch_size=[2]))["group_id"].tolist(), quota.missing
    ([3, 3], 1)
    >>> quota.inv(TensorDict(group_id=torch.tensor([4, 5, 4, 5]), batch_size=[4]))["group_id"].tolist(), quota.surplus
    ([4, 4], 1)
    """

    def __init__(self, num_groups: int, group_key: NestedKey = "group_id"):
        super().__init__()
        if num_groups < 1:
            raise ValueError(f"GroupQuota: num_groups must be at least 1: got {num_groups}.")
        self.num_groups = num_groups
        self.group_key = group_key
        self.reset()

    def reset(self) -> None:
        """Starts a new step."""
        self.written = 0
        self.surplus = 0  # groups left out in this step

    @property
    def missing(self) -> int:
        return self.num_groups - self.written

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        groups = td.get(self.group_key, None)
        if groups is None:
            raise MissingKeyError(
                f"GroupQuota: {self.group_key!r} must be in the batch; keys present: "
                f"{', '.join(sorted(map(repr, td.keys())))}."
            )
        groups = groups.flatten()
        order = list(dict.fromkeys(groups.tolist()))
        taken = order[: self.missing]
        self.written += len(taken)
        self.surplus += len(order) - len(taken)
        if len(taken) == len(order):
            return td
        return td[(groups[:, None] == groups.new_tensor(taken)).any(1)] if taken else None
