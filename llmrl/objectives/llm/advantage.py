"""`MCAdvantage`: waits until all completions of a prompt are there, then writes their advantages.

The arithmetic is ``group_advantage``'s; keeping rows while they wait is ``llmrl.data.replay_buffers.rows``'s.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from llmrl.data.replay_buffers.rows import Row, from_rows, pack, to_rows, unpack
from llmrl.envs.transforms.base import Transform
from llmrl.errors import DataError, MissingKeyError, ShapeError
from llmrl.objectives.llm.group_advantage import Scale, group_advantage

__all__ = ["MCAdvantage"]

_log = logging.getLogger(__name__)

Group = tuple[Hashable, Hashable]  # the prompt, the policy version (None where there is none)


class _Trajectory(NamedTuple):
    rows: list[Row]
    rewards: list[Tensor]  # one per step, float64


class MCAdvantage(Transform):
    """Replaces rewards by advantages relative to the other completions of the same prompt, on the way into a buffer.

    Reads   prompt_key        int64[B] or B strings; default "group_id" where present, else "query"
            "policy_version"  where present: completions by different weights are no group
            rewards_key       float[B, 1, 1] or [B, T, 1]; NaN or infinite: this completion failed
            done_key          bool[B, 1]
    Writes  advantage_key     float32, in the shape of the reward
    Returns from ``inv``: a batch [N] of whole groups, or None while there is none
    Raises  ValueError for settings that make no group, MissingKeyError for an absent entry, DataError if no row is done

    A row is one conversation, or one step of one: rows up to and including one that is done form a trajectory, so a
    flat batch may hold several (one after the other: steps of two trajectories of a group must not alternate), and the
    steps of a [B, T] batch are flattened. Trajectories wait in a queue until ``grpo_size`` of a group have come; the
    oldest of more than ``max_queued_groups`` waiting groups is given up. A batch of whole groups skips the queue.

    ``trajectory_return`` reduces the rewards of a trajectory to one number, which all its steps share; without it each
    step's reward is compared with those of all steps of the group. ``scale`` and ``eps`` are described in
    ``group_advantage``. Failed completions are left out; the group goes on without them if at least
    ``min_group_size`` remain (default: half of it, and two). ``keep_return_bounds=(low, high)`` drops groups whose mean
    return is not strictly between the two, such as those that always or never succeed; ``on_zero_variance="drop"``
    drops groups whose rewards are equal (their advantages are exactly 0, and train nothing).

    ``counters``: groups ``completed`` = ``written`` + ``dropped``; ``zero_variance`` groups among the completed; rows
    ``failed``; groups (and unfinished trajectories) ``evicted`` from the queue; groups ``queued`` in it now.

    >>> batch = TensorDict(
    ...     group_id=torch.tensor([7, 7]),
    ...     next=TensorDict(reward=torch.tensor([0.0, 1.0]).view(2, 1, 1), done=torch.ones(2, 1, dtype=torch.bool)),
    ...     batch_size=[2],
    ... )
    >>> MCAdvantage(grpo_size=2, scale="none").inv(batch)["advantage"].flatten()
    tensor([-0.5000,  0.5000])
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: Literal["sum", "max", "mean"] | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
        scale: Scale = "group",
        eps: float = 1e-4,
        min_group_size: int | None = None,
        max_queued_groups: int = 1024,
        on_zero_variance: Literal["keep", "drop"] = "keep",
        policy_version_key: NestedKey | None = "policy_version",
    ):
        super().__init__()
        if grpo_size < 2:
            raise ValueError(
                f"MCAdvantage: grpo_size must be at least 2, because a group of one has no baseline: got {grpo_size}."
            )
        if min_group_size is None:
            min_group_size = max(2, math.ceil(grpo_size / 2))
        if not 2 <= min_group_size <= grpo_size:
            raise ValueError(
                f"MCAdvantage: min_group_size must lie between 2 and grpo_size={grpo_size}: got {min_group_size}."
            )
        if trajectory_return not in (None, "sum", "max", "mean"):
            raise ValueError(
                f"MCAdvantage: trajectory_return must be 'sum', 'max', 'mean' or None: got {trajectory_return!r}."
            )
        if scale not in get_args(Scale):
            raise ValueError(f"MCAdvantage: scale must be one of {', '.join(get_args(Scale))}: got {scale!r}.")
        if on_zero_variance not in ("keep", "drop"):
            raise ValueError(f"MCAdvantage: on_zero_variance must be 'keep' or 'drop': got {on_zero_variance!r}.")
        if keep_return_bounds is not None and not keep_return_bounds[0] < keep_return_bounds[1]:
            raise ValueError(
                f"MCAdvantage: keep_return_bounds must be (low, high) with low < high: got {keep_return_bounds}."
            )
        if eps < 0 or max_queued_groups < 1:
            raise ValueError(
                "MCAdvantage: eps must not be negative and max_queued_groups must be positive: got "
                f"{eps} and {max_queued_groups}."
            )
        self.grpo_size = grpo_size
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.advantage_key = advantage_key
        self.done_key = done_key
        self.policy_version_key = policy_version_key
        self.verbose = verbose
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = keep_return_bounds
        self.scale = scale
        self.eps = eps
        self.min_group_size = min_group_size
        self.max_queued_groups = max_queued_groups
        self.on_zero_variance = on_zero_variance
        names = ("completed", "written", "dropped", "zero_variance", "failed", "evicted", "queued")
        self.counters = dict.fromkeys(names, 0)
        self._queue: OrderedDict[Group, list[_Trajectory]] = OrderedDict()
        self._open: dict[Group, _Trajectory] = {}  # steps whose trajectory has not ended yet

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if not td.batch_dims:
            td = LazyStackedTensorDict(td)
        whole = self._whole_groups(td) if type(td) is TensorDict and td.batch_dims == 1 else None
        if whole is not None:
            return self._write_batch(td, *whole)
        parts = td.unbind(0) if td.batch_dims > 1 else [td]
        ended = [trajectory for part in parts for trajectory in self._split(part, flat=td.batch_dims == 1)]
        return self._write_rows(self._complete(ended))

    # --- a batch of whole groups: no loop over rows ---

    def _whole_groups(self, td: TensorDict) -> tuple[Tensor, Tensor] | None:
        """(rewards_BK, order_NG) if every row is a finished trajectory and the rows are groups of exactly grpo_size."""
        done = self._get(td, self.done_key)
        if not bool(done.all()):
            return None
        rewards = self._get(td, self.rewards_key)
        rows, size = td.batch_size[0], self.grpo_size
        if not rows or rows % size or rewards.shape[0] != rows:
            return None
        ids_B = self._group_numbers(td)
        order_B = torch.argsort(ids_B, stable=True)
        sorted_NG = ids_B[order_B].view(-1, size)
        if not torch.equal(sorted_NG[:, 0], sorted_NG[:, -1]):
            return None
        if self._queue or self._open:
            waiting = self._queue.keys() | self._open.keys()
            if not waiting.isdisjoint(self._groups(td)):
                return None
        return rewards.reshape(rows, -1), order_B.view(-1, size)

    def _write_batch(self, td: TensorDict, rewards_BK: Tensor, order_NG: Tensor) -> TensorDictBase | None:
        order_B = order_NG.flatten().to(rewards_BK.device)
        rewards_NGK = rewards_BK.detach().to(torch.float64)[order_B].view(*order_NG.shape, -1)
        advantage_NGK, keep_NG = self._advantages(rewards_NGK)
        advantage_BK = torch.empty_like(rewards_BK, dtype=torch.float32)
        advantage_BK[order_B] = advantage_NGK.flatten(0, 1).to(torch.float32)
        shape = self._get(td, self.rewards_key).shape
        td = _with_entry(td, self.advantage_key, advantage_BK.view(shape))
        if bool(keep_NG.all()):
            return td
        keep_B = torch.empty_like(order_B, dtype=torch.bool)
        keep_B[order_B] = keep_NG.flatten()
        return td[keep_B] if bool(keep_B.any()) else None

    def _group_numbers(self, td: TensorDictBase) -> Tensor:
        """int64[B], equal for rows of one group."""
        prompts = self._prompts(td)
        versions = None if self.policy_version_key is None else td.get(self.policy_version_key, None)
        if isinstance(prompts, Tensor) and (versions is None or isinstance(versions, Tensor)):
            prompts_B = prompts.reshape(len(prompts), -1)
            if prompts_B.shape[1] == 1:
                prompts_B = prompts_B[:, 0]
                if versions is None or bool((versions == versions.flatten()[0]).all()):
                    return prompts_B
        numbers: dict[Group, int] = {}
        return torch.tensor([numbers.setdefault(group, len(numbers)) for group in self._groups(td)])

    # --- anything else: trajectory by trajectory ---

    def _split(self, td: TensorDictBase, flat: bool) -> list[tuple[Group, _Trajectory]]:
        """The trajectories that end in ``td[T]``; in a flat batch, what has not ended waits for the next call."""
        done_T = self._get(td, self.done_key).reshape(td.batch_size[0], -1).any(-1).tolist()
        if not any(done_T) or not (flat or done_T[-1]):
            where = ", but not in the last one of a [B, T] batch." if any(done_T) else "."
            raise DataError(
                f"MCAdvantage: trajectories must end: got {self.done_key!r} True in {sum(done_T)} of {len(done_T)} "
                f"steps{where}"
            )
        groups = self._groups(td)
        rewards = list(self._get(td, self.rewards_key).detach().to("cpu", torch.float64).unbind(0))
        ended: list[tuple[Group, _Trajectory]] = []
        for row, group, reward, done in zip(to_rows(td), groups, rewards, done_T, strict=True):
            trajectory = self._open.setdefault(group, _Trajectory([], []))
            trajectory.rows.append(row)
            trajectory.rewards.append(reward)
            if done:
                ended.append((group, self._open.pop(group)))
        return ended

    def _complete(self, ended: Sequence[tuple[Group, _Trajectory]]) -> list[list[_Trajectory]]:
        """Queues trajectories; returns the groups that are whole now."""
        whole = []
        for group, trajectory in ended:
            members = self._queue.setdefault(group, [])
            members.append(trajectory)
            if len(members) == self.grpo_size:
                whole.append(self._queue.pop(group))
        while len(self._queue) > self.max_queued_groups:
            self._evict(*self._queue.popitem(last=False))
        while len(self._open) > self.max_queued_groups * self.grpo_size:
            self._open.pop(next(iter(self._open)))
            self.counters["evicted"] += 1
        self.counters["queued"] = len(self._queue)
        return whole

    def _evict(self, group: Group, members: list[_Trajectory]) -> None:
        self.counters["evicted"] += 1
        _log.warning(
            f"MCAdvantage: group {group} was given up with {len(members)} of {self.grpo_size} completions, because "
            f"more than max_queued_groups={self.max_queued_groups} groups wait."
        )

    def _write_rows(self, groups: list[list[_Trajectory]]) -> TensorDictBase | None:
        if not groups:
            return None
        lengths = [[sum(reward.numel() for reward in member.rewards) for member in group] for group in groups]
        longest = max(max(row) for row in lengths)
        rewards_NGK = torch.full((len(groups), self.grpo_size, longest), torch.nan, dtype=torch.float64)
        absent_NGK = torch.ones_like(rewards_NGK, dtype=torch.bool)
        for n, group in enumerate(groups):
            for g, member in enumerate(group):
                flat = torch.cat([reward.flatten() for reward in member.rewards])
                rewards_NGK[n, g, : len(flat)] = flat
                absent_NGK[n, g, : len(flat)] = False
        advantage_NGK, keep_NG = self._advantages(rewards_NGK, absent_NGK)
        rows: list[Row] = []
        advantages: list[Tensor] = []
        for n, group in enumerate(groups):
            for g, member in enumerate(group):
                if keep_NG[n, g]:
                    values = advantage_NGK[n, g].to(torch.float32)[: lengths[n][g]]
                    sizes = [reward.numel() for reward in member.rewards]
                    for reward, value in zip(member.rewards, values.split(sizes), strict=True):
                        advantages.append(value.view(reward.shape))
                    rows.extend(member.rows)
        if not rows:
            return None
        td = from_rows(rows)
        if len({value.shape for value in advantages}) == 1:
            advantage = torch.stack(advantages)
            td.set(self.advantage_key, advantage.to(td.device) if td.device is not None else advantage)
        else:
            singles = list(td.unbind(0))
            for single, value in zip(singles, advantages, strict=True):
                single.set(self.advantage_key, value)
            td = LazyStackedTensorDict.lazy_stack(singles)
        return td

    # --- both ---

    def _advantages(self, rewards_NGK: Tensor, absent_NGK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Advantages float64[N, G, K], and bool[N, G]: the completions to write. K rewards each; absent is padding."""
        num_groups, size, _ = rewards_NGK.shape
        broken_NGK = ~rewards_NGK.isfinite()
        if absent_NGK is not None:
            broken_NGK &= ~absent_NGK
        failed_NG = broken_NGK.any(-1)
        num_failed = int(failed_NG.sum())
        if num_failed:
            rewards_NGK = rewards_NGK.masked_fill(failed_NG.unsqueeze(-1), torch.nan)
        keep_N = size - failed_NG.sum(1) >= self.min_group_size
        returns_NG = self._returns(rewards_NGK)
        values_NC = rewards_NGK.flatten(1) if self.trajectory_return is None else returns_NG
        equal_N = values_NC.nan_to_num(torch.inf).amin(1) >= values_NC.nan_to_num(-torch.inf).amax(1)
        self.counters["zero_variance"] += int((equal_N & keep_N).sum())
        if self.on_zero_variance == "drop":
            keep_N &= ~equal_N
        if self.keep_return_bounds is not None:
            low, high = self.keep_return_bounds
            mean_N = returns_NG.nanmean(1)
            keep_N &= (mean_N > low) & (mean_N < high)
        advantage_NC = torch.full_like(values_NC, torch.nan)
        if bool(keep_N.any()):
            advantage_NC[keep_N] = group_advantage(values_NC[keep_N], scale=self.scale, eps=self.eps)
        written = int(keep_N.sum())
        self.counters["failed"] += num_failed
        self.counters["completed"] += num_groups
        self.counters["written"] += written
        self.counters["dropped"] += num_groups - written
        if self.verbose:
            _log.info(
                "MCAdvantage: %d groups written, %d dropped; so far %s.", written, num_groups - written, self.counters
            )
        advantage_NGC = advantage_NC.view(num_groups, size, -1)
        return advantage_NGC.expand_as(rewards_NGK), keep_N.unsqueeze(1) & ~failed_NG

    def _returns(self, rewards_NGK: Tensor) -> Tensor:
        """What a trajectory got, float64[N, G]; NaN if it failed."""
        if rewards_NGK.shape[-1] == 1:
            return rewards_NGK.squeeze(-1)
        gone_NG = rewards_NGK.isnan().all(-1)
        if self.trajectory_return == "max":
            returns_NG = rewards_NGK.nan_to_num(-torch.inf).amax(-1)
        elif self.trajectory_return == "mean":
            returns_NG = rewards_NGK.nanmean(-1)
        else:
            returns_NG = rewards_NGK.nansum(-1)
        return returns_NG.masked_fill(gone_NG, torch.nan)

    def _prompts(self, td: TensorDictBase) -> Any:
        if self.prompt_key is not None:
            return self._get(td, self.prompt_key)
        prompts = td.get("group_id", None)
        return self._get(td, "query") if prompts is None else prompts

    def _groups(self, td: TensorDictBase) -> list[Group]:
        rows = td.batch_size[0]
        versions = None if self.policy_version_key is None else td.get(self.policy_version_key, None)
        prompts = _values(self._prompts(td), rows)
        return list(zip(prompts, [None] * rows if versions is None else _values(versions, rows), strict=True))

    def _get(self, td: TensorDictBase, key: NestedKey) -> Any:
        value = td.get(key, None)
        if value is None:
            raise MissingKeyError(
                f"MCAdvantage: {key!r} must be in the batch; keys present: {', '.join(sorted(map(repr, td.keys())))}."
            )
        return value

    def state_dict(self) -> dict[str, Any]:
        """The counters and everything that waits."""
        return {
            "counters": dict(self.counters),
            "queue": [(group, [_pack(member) for member in members]) for group, members in self._queue.items()],
            "open": [(group, _pack(trajectory)) for group, trajectory in self._open.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = dict(state["counters"])
        self._queue = OrderedDict((group, [_unpack(member) for member in members]) for group, members in state["queue"])
        self._open = {group: _unpack(trajectory) for group, trajectory in state["open"]}


def _values(column: Any, rows: int) -> list[Hashable]:
    """A column as one hashable value per row."""
    if isinstance(column, Tensor):
        flat = column.reshape(rows, -1)
        return flat[:, 0].tolist() if flat.shape[1] == 1 else [tuple(row) for row in flat.tolist()]
    if is_tensorclass(column):  # one value for all rows
        return [column.data] * rows
    values = column.tolist() if hasattr(column, "tolist") else column
    if isinstance(values, str | int):
        return [values] * rows
    if len(values) != rows:
        raise ShapeError(f"MCAdvantage: there must be one prompt per row: got {len(values)} for {rows} rows.")
    return list(values)


def _with_entry(td: TensorDict, key: NestedKey, value: Tensor) -> TensorDict:
    """The same entries and one more, in new containers along the path to it; ``td`` is not touched."""
    name, rest = (key, ()) if isinstance(key, str) else (key[0], tuple(key[1:]))
    entries = dict(td.items())
    if rest:
        inner = entries.get(name)
        inner = TensorDict({}, batch_size=td.batch_size, device=td.device) if inner is None else inner
        value = _with_entry(inner, rest, value)
    entries[name] = value
    return TensorDict._new_unsafe(entries, batch_size=td.batch_size, device=td.device)


def _pack(trajectory: _Trajectory) -> dict[str, Any]:
    return {"rows": pack(trajectory.rows), "rewards": [reward.clone() for reward in trajectory.rewards]}


def _unpack(state: dict[str, Any]) -> _Trajectory:
    return _Trajectory(unpack(state["rows"]), [reward.clone() for reward in state["rewards"]])
