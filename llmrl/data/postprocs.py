"""Rewards over several steps, for whole batches: n-step returns and rewards-to-go.

Batches have time last. Trajectories end where ``done`` is True, before a row with a False mask, and at the last row.
`llmrl.envs.transforms.MultiStepTransform` computes the same on the way into a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, NonTensorData, TensorDictBase
from torch import Tensor, nn

from llmrl.data.ragged.tensordicts import required
from llmrl.data.ted_utils import as_key, expand_right, leaf_keys, steps_left, sum_ahead
from llmrl.errors import ConfigError, MissingKeyError, ShapeError

__all__ = ["DensifyReward", "MultiStep"]

Key = tuple[str, ...]


class MultiStep(nn.Module):
    """Computes n-step returns: sums discounted rewards, and replaces ``"next"`` by the state n steps later.

    With m = min(n, rows left in the trajectory) for each row t:

    Reads    ``("next", *)`` of a batch [*B, T], time last, and the mask if present
    Writes   rewards: ``sum_{j<m} gamma^j r_{t+j}``; every other entry of ``"next"``, done flags included: its value
             at row t+m-1; ``"steps_to_next_obs"``: m, int64; ``"gamma"``: gamma^m; ``"nonterminal"``: m > 1, all three
             [*B, T], or shaped as the flags if a row has several; the original values as
             ``("next", "original_reward")`` and ``("next", "original_done")``, for each of the reward and done keys
    Returns  a shallow copy; the input batch is unchanged
    Raises   ConfigError, MissingKeyError, ShapeError
    Source   Sutton 1988, doi:10.1007/BF00115009; Hessel et al. 2018, arXiv:1710.02298

    A value target is ``reward + gamma * (not done) * value(next)``. Rows where the mask is False keep their values and
    get ``nonterminal`` False. ``reward_keys``, ``done_key`` and ``done_keys`` are keys under ``"next"``.

    >>> from tensordict import TensorDict
    >>> following = TensorDict(reward=torch.ones(3, 1), done=torch.tensor([[False], [True], [False]]), batch_size=[3])
    >>> MultiStep(gamma=0.5, n_steps=2)(TensorDict(next=following, batch_size=[3]))["next", "reward"].flatten()
    tensor([1.5000, 1.0000, 1.0000])
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey = "done",
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = ("collector", "mask"),
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if not 0 < gamma <= 1:
            raise ConfigError(f"{who}: gamma is a discount and must be in (0, 1]: got {gamma}.")
        if n_steps < 1 or int(n_steps) != n_steps:
            raise ConfigError(f"{who}: n_steps must be an integer >= 1: got {n_steps}.")
        self.gamma, self.n_steps = float(gamma), int(n_steps)
        self.reward_keys = [as_key(key) for key in (["reward"] if reward_keys is None else reward_keys)]
        self.done_key = as_key(done_key)
        self.done_keys = [as_key(key) for key in ([done_key] if done_keys is None else done_keys)]
        self.mask_key = mask_key

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        time = td.batch_dims - 1
        done = self._get(td, self.done_key)
        ends = _row_flags(done, td.batch_size)
        if ends is None or not td.batch_dims:
            raise ShapeError(
                f"{type(self).__name__}: a batch must have time as its last dimension, and at least one flag "
                f"{self.done_key} per row: got batch size {list(td.batch_size)}, flags {list(done.shape)}."
            )
        mask = None if self.mask_key is None else td.get(self.mask_key, None)
        if mask is not None:
            # A window stops before a masked row, and a masked row is its own window: it has ends on both sides.
            mask = expand_right(mask.reshape(td.batch_size), ends.ndim)
            behind = torch.ones_like(mask)
            behind.narrow(time, 0, mask.shape[time] - 1).copy_(mask.narrow(time, 1, mask.shape[time] - 1))
            ends = ends | ~mask | ~behind
        left = steps_left(ends, time)
        steps = left.clamp(max=self.n_steps)

        following = self._look_ahead(td.get("next"), steps, time)
        dtype = torch.get_default_dtype()
        for key in self.reward_keys:
            reward = self._get(td, key)
            self._check_rows(key, reward.shape, steps.shape)
            following.set(_original(key), reward)
            dtype = reward.dtype if reward.is_floating_point() else dtype
            following.set(key, sum_ahead(reward.to(dtype), left, self.n_steps, self.gamma, time))
        for key in self.done_keys:
            following.set(_original(key), self._get(td, key))
        several = steps > 1 if mask is None else (steps > 1) & mask

        # Entries below have one value per row, or one per flag if a row has several (agents), even if these agree.
        flags = done.shape[:-1] if done.shape[-1] == 1 else done.shape
        shape = td.batch_size if done.numel() == td.numel() else flags

        def as_rows(value: Tensor) -> Tensor:
            return expand_right(value, len(shape)).expand(shape).clone()

        out = td.copy()
        out.set("next", following)
        out.set("steps_to_next_obs", as_rows(steps))
        out.set("gamma", as_rows(torch.pow(self.gamma, steps.to(dtype))))
        out.set("nonterminal", as_rows(several))
        return out

    def _get(self, td: TensorDictBase, key: Key) -> Tensor:
        return required(td, ("next", *key), type(self).__name__)

    def _look_ahead(self, following: TensorDictBase, steps: Tensor, time: int) -> TensorDictBase:
        """A copy of ``"next"`` in which all entries but the rewards are those of the last row of the window."""
        # The source row of each row, as an index into the flattened batch, where one time step is ``stride`` rows.
        shape, count = steps.shape, steps.numel()
        stride = shape[time + 1 :].numel()
        source = torch.arange(count, device=steps.device) + (steps.reshape(-1) - 1) * stride
        out = following.copy()
        for key in leaf_keys(following):
            value = following.get(key)
            if key in self.reward_keys or isinstance(value, NonTensorData):
                continue
            self._check_rows(key, value.shape, shape)
            rows = value.reshape(count, *value.shape[len(shape) :])
            rows = rows.index_select(0, source) if isinstance(value, Tensor) else rows[source]
            out.set(key, rows.reshape(value.shape))
        return out

    def _check_rows(self, key: Key, got: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(got[: len(shape)]) != tuple(shape):
            raise ShapeError(
                f"{type(self).__name__}: {('next', *key)} must have one value per flag of "
                f"{('next', *self.done_key)}, because the flags of a row differ: got {list(got)}, expected "
                f"{list(shape)} as leading dims."
            )


class DensifyReward(nn.Module):
    """Computes rewards-to-go: the sum of the rewards from each row to the end of its trajectory.

    Reads    ``reward_key`` and ``done_key``, of the same shape, under ``"next"`` if the reward is there, else at the
             root; ``time_dim`` is their time dimension, by default the second to last
    Writes   ``reward_key_out`` (default: ``reward_key``), in the same tensordict: ``sum_j discount^j reward_{t+j}``
             up to the next done
    Returns  the input tensordict; its tensors are not modified in place
    Raises   ShapeError if the shapes differ or have no ``time_dim``; MissingKeyError if reward or done is missing

    >>> from tensordict import TensorDict
    >>> batch = TensorDict(reward=torch.tensor([[0.0], [2.0], [0.0]]), done=torch.tensor([[0], [1], [0]]).bool())
    >>> DensifyReward()(batch)["reward"].flatten().tolist()
    [2.0, 2.0, 0.0]
    """

    def __init__(
        self,
        *,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        reward_key_out: NestedKey | None = None,
        time_dim: int = -2,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.reward_key, self.done_key = reward_key, done_key
        self.reward_key_out = reward_key if reward_key_out is None else reward_key_out
        self.time_dim, self.discount = time_dim, discount

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        following = td.get("next", None)
        steps = td if following is None or following.get(self.reward_key, None) is None else following
        reward, done = steps.get(self.reward_key, None), steps.get(self.done_key, None)
        if reward is None or done is None:
            raise MissingKeyError(
                f"DensifyReward: needs {self.reward_key!r} and {self.done_key!r}, at the root or under 'next': keys "
                f"present: {sorted(map(str, td.keys(True, True)))}."
            )
        if reward.shape != done.shape:
            raise ShapeError(
                f"DensifyReward: {self.reward_key!r} and {self.done_key!r} must have one shape: got "
                f"{list(reward.shape)} and {list(done.shape)}."
            )
        if not -reward.ndim <= self.time_dim < reward.ndim:
            raise ShapeError(
                f"DensifyReward: time_dim must be a dimension of {self.reward_key!r}: got {self.time_dim}, shape "
                f"{list(reward.shape)}."
            )
        dim = self.time_dim % reward.ndim
        left = steps_left(done.to(torch.bool), dim)
        steps.set(self.reward_key_out, sum_ahead(reward, left, reward.shape[dim], self.discount, dim))
        return td


def _row_flags(done: Tensor, rows: torch.Size) -> Tensor | None:
    """bool[*rows] if each row's flags agree, else bool[*rows, ...] without a trailing 1; None if that is impossible."""
    if done.shape[: len(rows)] != rows:
        return None
    flags = done.to(torch.bool)
    per_row = flags.reshape(*rows, -1)
    if bool((per_row == per_row[..., :1]).all()):
        return per_row[..., 0]
    return flags.squeeze(-1) if flags.shape[-1] == 1 else flags


def _original(key: Key) -> Key:
    return (*key[:-1], f"original_{key[-1]}")
