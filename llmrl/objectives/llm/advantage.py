"""`MCAdvantage`: collects all completions of a prompt, then writes their advantages.

The arithmetic, the queue and the choice among candidates are in `groups`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from typing import Any, Literal, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import new_tensordict, required, row_values
from llmrl.data.replay_buffers.storages.row_list import from_rows, to_rows
from llmrl.envs.transforms.base import Transform
from llmrl.errors import DataError, ShapeError
from llmrl.modules.llm.policies.columns import SEAT
from llmrl.objectives.llm.batch import trained_tokens
from llmrl.objectives.llm.groups import (
    Advantages,
    CandidateSelector,
    Group,
    GroupQueue,
    GroupRewards,
    Trajectory,
    consecutive_rows,
    group_advantage,
    select_spread,
    selected_indices,
    whitened,
)
from llmrl.objectives.llm.settings import Scale

_log = logging.getLogger(__name__)

_COUNTED = ("completed", "written", "dropped", "rescued", "zero_variance", "failed", "evicted", "late")
_COUNTED += ("trajectories", "decisions")
_WAITING = ("queued", "queued_trajectories")


class MCAdvantage(Transform):
    """Replaces rewards by advantages relative to the other completions of the same prompt, on the way into a buffer.

    Reads   prompt_key        int64[B] or B strings, also numpy; default "group_id" if present, else "query"
            "policy_version"  if present: completions of different weights do not form one group
            "env_seat"        if present: the rewards of each seat of a game are compared among themselves
            rewards_key       float[B, 1, 1], or [B, T, 1], also ragged; NaN or infinite: the completion failed
            done_key          bool[B, 1]
            mask_key          bool ragged[T], if ``whiten``
            ``reward_weights``  float[B, 1, 1] of each reward, NaN where it does not apply: a key and its weight
    Writes  advantage_key     float32, in the shape of the reward
    Returns from ``inv``: a batch [N] of complete groups, or None if there is none yet
    Raises  ValueError for invalid settings, MissingKeyError for an absent entry, DataError if no row is done

    docs/algorithms.md, "The advantage", explains the settings, the counters and how rows form trajectories.

    ``gather`` returns the tensors of all processes: with it ``scale="batch"``, ``whiten`` and ``reward_weights`` use
    the batch of all of them, and each must call ``inv`` equally often, also without rows.

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
        scale: Scale | Advantages = "group",
        eps: float = 1e-6,
        min_group_size: int | None = None,
        max_queued_groups: int = 1024,
        on_zero_variance: Literal["keep", "drop"] = "keep",
        min_spread: float = 0.0,
        policy_version_key: NestedKey | None = "policy_version",
        whiten: bool = False,
        mask_key: NestedKey = ("masks", "all_assistant_mask"),
        reward_weights: Mapping[NestedKey, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: CandidateSelector | None = None,
        gather: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ):
        super().__init__()
        self.gather = gather
        self.group_size = grpo_size
        self.prompt_key, self.rewards_key, self.advantage_key = prompt_key, rewards_key, advantage_key
        self.done_key, self.mask_key, self.policy_version_key = done_key, mask_key, policy_version_key
        self.verbose = verbose
        self.trajectory_return, self.keep_return_bounds = trajectory_return, keep_return_bounds
        self.scale, self.eps, self.whiten, self.reward_weights = scale, eps, whiten, reward_weights
        self.min_group_size = max(2, math.ceil(grpo_size / 2)) if min_group_size is None else min_group_size
        self.max_queued_groups, self.on_zero_variance = max_queued_groups, on_zero_variance
        self.min_spread = min_spread
        self.candidate_group_size = candidate_group_size
        self.candidate_selection_min_size = candidate_selection_min_size
        self.candidate_selector = candidate_selector
        for holds, problem in self._checks():
            if not holds:
                raise ValueError(f"MCAdvantage: {problem}.")
        self.counters: dict[str, int | float] = dict.fromkeys(_WAITING, 0)
        self.reset_counters()
        self._queue = GroupQueue(
            candidate_selection_min_size or grpo_size,
            candidate_group_size or grpo_size,
            max_queued_groups=max_queued_groups,
            counters=self.counters,
            choose=self._choose,
            give_up=self._give_up,
        )

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """The rules of the settings, each with the error message for its violation."""
        size, bounds = self.group_size, self.keep_return_bounds
        yield size >= 2, f"grpo_size must be at least 2, because a group of one has no baseline: got {size}"
        yield (
            2 <= self.min_group_size <= size,
            f"min_group_size must lie between 2 and grpo_size={size}: got {self.min_group_size}",
        )
        yield (
            self.trajectory_return in (None, "sum", "max", "mean"),
            f"trajectory_return must be 'sum', 'max', 'mean' or None: got {self.trajectory_return!r}",
        )
        yield (
            callable(self.scale) or self.scale in get_args(Scale),
            f"scale must be a function or one of {', '.join(get_args(Scale))}: got {self.scale!r}",
        )
        yield (
            self.on_zero_variance in ("keep", "drop"),
            f"on_zero_variance must be 'keep' or 'drop': got {self.on_zero_variance!r}",
        )
        yield (
            self.scale != "raw" or self.on_zero_variance == "keep",
            "on_zero_variance='drop' is not supported with scale='raw', where equal rewards teach too",
        )
        yield (
            self.min_spread == 0
            or (self.min_spread > 0 and self.on_zero_variance == "drop" and not self.reward_weights),
            f"min_spread must be at least 0, and above 0 needs on_zero_variance='drop', without reward_weights: got "
            f"{self.min_spread}",
        )
        yield (
            bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1]),
            f"keep_return_bounds must be (low, high) with low < high: got {bounds}",
        )
        decoupled = self.scale not in ("batch", "raw") and not self.whiten and self.candidate_group_size is None
        yield (
            self.reward_weights is None or decoupled,
            "reward_weights, each normalised in its group, are not supported with scale='batch' or 'raw', whiten, or "
            "candidate_group_size",
        )
        yield self.eps >= 0, f"eps must not be negative: got {self.eps}"
        yield self.max_queued_groups >= 1, f"max_queued_groups must be positive: got {self.max_queued_groups}"
        most, fewest = self.candidate_group_size, self.candidate_selection_min_size
        selector = self.candidate_selector
        yield (
            most is not None or (fewest is None and selector is None),
            "candidate_selection_min_size and candidate_selector need candidate_group_size",
        )
        yield most is None or most >= size, f"candidate_group_size must be at least grpo_size={size}: got {most}"
        yield (
            fewest is None or most is None or size <= fewest <= most,
            f"candidate_selection_min_size must lie between grpo_size={size} and candidate_group_size={most}: got "
            f"{fewest}",
        )
        yield selector is None or callable(selector), f"candidate_selector must be callable: got {selector!r}"

    def reset_counters(self) -> None:
        """Sets the counters to zero, except those of the queue, which stays as it is."""
        self.counters |= {**dict.fromkeys(_COUNTED, 0), "return_sum": 0.0, "return_max": -math.inf}

    def clear_queues(self) -> None:
        """Empties the queue; the counters stay."""
        self._queue.clear()

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if 0 in td.batch_size:
            return self._no_rows(scaled=False)
        if not td.batch_dims:
            td = LazyStackedTensorDict(td)
        rewards = self._whole_groups(td)
        if rewards is not None:  # no row waits, so none is copied
            self._count_ended(rewards)
            return self._write(td, rewards)
        groups = self._queue.complete(self._split(td))
        if not groups:
            return self._no_rows(scaled=False)
        rows = [row for group in groups for member in group for row in member.rows]
        return self._write(from_rows(rows), self._read(groups))

    # --- which rows form groups ---

    def _whole_groups(self, td: TensorDictBase) -> GroupRewards | None:
        """The rewards if every row is a finished trajectory and the rows are groups of exactly grpo_size."""
        if type(td) is not TensorDict or td.batch_dims != 1 or self.candidate_group_size is not None:
            return None
        if not bool(self._get(td, self.done_key).all()):
            return None
        rows_of: dict[Group, list[int]] = {}
        for row, group in enumerate(self._groups(td)):
            rows_of.setdefault(group, []).append(row)
        # Completions that already wait in the queue come first in their group: only the queue adds them.
        size = self.group_size
        if any(len(rows) % size for rows in rows_of.values()) or (self._queue and self._queue.knows(rows_of)):
            return None
        place_NGS = torch.tensor([row for rows in rows_of.values() for row in rows]).view(-1, size, 1)
        return GroupRewards.of(self._get(td, self.rewards_key), place_NGS, self.trajectory_return)

    def _split(self, td: TensorDictBase) -> list[tuple[Group, Trajectory]]:
        """Queues each step; the trajectories that end. In a flat batch, unfinished ones wait for the next call."""
        ended: list[tuple[Group, Trajectory]] = []
        for part in td.unbind(0) if td.batch_dims > 1 else [td]:
            done_T = self._get(part, self.done_key).reshape(part.batch_size[0], -1).any(-1).tolist()
            if not any(done_T) or not (td.batch_dims == 1 or done_T[-1]):
                where = ", but not in the last one of a [B, T] batch." if any(done_T) else "."
                raise DataError(
                    f"MCAdvantage: trajectories must end: got {self.done_key!r} True in {sum(done_T)} of {len(done_T)} "
                    f"steps{where}"
                )
            rewards = [reward.detach().to("cpu", torch.float64) for reward in self._get(part, self.rewards_key)]
            for row, group, reward, done in zip(to_rows(part), self._groups(part), rewards, done_T, strict=True):
                if (trajectory := self._queue.add_step(group, row, reward, done=done)) is not None:
                    ended.append((group, trajectory))
        if ended:
            self._count_ended(self._read([[trajectory] for _, trajectory in ended]))
        return ended

    def _read(self, groups: list[list[Trajectory]]) -> GroupRewards:
        rewards = [reward for group in groups for member in group for reward in member.rewards]
        places_NGS = consecutive_rows([[len(member.rows) for member in group] for group in groups])
        return GroupRewards.of(rewards, places_NGS, self.trajectory_return)

    def _count_ended(self, rewards: GroupRewards) -> None:
        returns = [value for value in rewards.returns_NG.flatten().tolist() if not math.isnan(value)]
        self.counters["trajectories"] += len(returns)
        self.counters["decisions"] += len(rewards.rows)
        self.counters["return_sum"] += sum(returns)
        self.counters["return_max"] = max([self.counters["return_max"], *returns])

    def _give_up(self, members: list[Trajectory]) -> None:
        self.counters["completed"] += 1
        self.counters["dropped"] += 1
        self.counters["failed"] += int(self._read([members]).failed_NG.sum())

    def _choose(self, members: list[Trajectory]) -> list[Trajectory] | None:
        """``grpo_size`` of the candidates; after the last one fewer, if others failed. None if they would be dropped.

        Without candidates a group is returned as it is: `_advantages` drops it if necessary, and counts the reason.
        """
        if self.candidate_group_size is None:
            return members
        rewards = self._read([members])
        scored = list(compress(members, rewards.scored_NG[0].tolist()))
        if len(scored) >= self.group_size:
            group = from_rows([member.rows[-1] for member in scored])
            group.set("return", rewards.returns_NG[rewards.scored_NG])
            selected = (self.candidate_selector or select_spread)(group, self.group_size)
            if selected is None:
                return None
            chosen = [scored[index] for index in selected_indices(selected, self.group_size, len(scored))]
        elif len(members) == self.candidate_group_size and len(scored) >= self.min_group_size:
            chosen = scored
        else:
            return None
        equal_N, within_N = self._rules(self._read([chosen]))
        if not within_N or (equal_N and self.on_zero_variance == "drop"):
            return None
        self.counters["failed"] += len(members) - len(scored)
        # "rescued": without more candidates than grpo_size, this group would have taught nothing.
        equal_N, within_N = self._rules(self._read([scored[: self.group_size]]))
        self.counters["rescued"] += int(equal_N | ~within_N)
        return chosen

    # --- from rewards to advantages ---

    def _write(self, td: TensorDictBase, rewards: GroupRewards) -> TensorDictBase | None:
        """The rows to train, with their advantages."""
        advantage_NGK, keep_NG = self._advantages(rewards, td)
        place_M, advantage_ML = rewards.place_NGS.flatten(), advantage_NGK.reshape(rewards.place_NGS.numel(), -1)
        keep_M, rows = keep_NG.unsqueeze(-1).expand_as(rewards.place_NGS).flatten(), rewards.rows
        if len(place_M) > len(rows):  # some places have no row
            is_row_M = place_M >= 0
            place_M, advantage_ML, keep_M = place_M[is_row_M], advantage_ML[is_row_M], keep_M[is_row_M]
        # Assigning by place undoes the sorting by group: row i of the batch gets its own advantage.
        advantages = torch.empty_like(advantage_ML, dtype=torch.float32)
        advantages[place_M] = advantage_ML.to(torch.float32)
        if not bool(keep_M.all()):
            keep_B = torch.empty_like(keep_M)
            keep_B[place_M] = keep_M
            if not bool(keep_B.any()):
                return self._no_rows()
            td, advantages = td[keep_B], advantages[keep_B]
            rows = rows[keep_B] if isinstance(rows, Tensor) else list(compress(rows, keep_B.tolist()))
        if isinstance(rows, Tensor):
            advantages = advantages.view(rows.shape)
        else:
            advantages = [own[: row.numel()].view(row.shape) for own, row in zip(advantages, rows, strict=True)]
        if self.whiten:
            advantages = self._whitened(td, advantages)
        return _with_entry(td, self.advantage_key, advantages)

    def _of_all(self, values: Tensor) -> Tensor:
        """The values of all processes, one after another; a collective."""
        return values if self.gather is None else torch.cat(self.gather([values.cpu()])).to(values.device)

    @property
    def _uses_batch(self) -> bool:
        return self.scale == "batch" or self.reward_weights is not None

    def _no_rows(self, *, scaled: bool = True) -> None:
        """Nothing to write; this process still takes part in what the others exchange."""
        nothing = torch.empty(0, dtype=torch.float64)
        for _ in range((self._uses_batch and not scaled) + 2 * self.whiten):
            self._of_all(nothing)

    def _whitened(self, td: TensorDictBase, advantages: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        mask_BT, lengths = trained_tokens(td, self.mask_key, "MCAdvantage")
        weights = []
        for row, (mask, advantage) in enumerate(zip(mask_BT, advantages, strict=True)):
            num_tokens = len(mask) if lengths is None else lengths[row]
            if advantage.numel() not in (1, num_tokens):
                raise ShapeError(
                    f"MCAdvantage: whiten needs one advantage per conversation or per token: got {advantage.numel()} "
                    f"in row {row}, whose conversation has {num_tokens} tokens."
                )
            # An advantage per conversation counts once per trained token: the moments are those over tokens.
            weights.append(mask.sum().view(1) if advantage.numel() == 1 else mask[:num_tokens])
        values, counts = torch.cat([value.flatten() for value in advantages]), torch.cat(weights)
        flat = whitened(values, counts, (self._of_all(values), self._of_all(counts)))
        parts = flat.to(torch.float32).split([value.numel() for value in advantages])
        parts = [part.view(value.shape) for part, value in zip(parts, advantages, strict=True)]
        return torch.stack(parts) if isinstance(advantages, Tensor) else parts

    def _rules(self, rewards: GroupRewards) -> tuple[Tensor, Tensor]:
        """Masks bool[N]: groups whose values differ by at most ``min_spread``; with a mean return within the bounds."""
        # compares values, not the std with 0: the std of equal rewards can be a rounding error above 0
        values_NC = rewards.values_NC
        spread_N = values_NC.nan_to_num(-torch.inf).amax(1) - values_NC.nan_to_num(torch.inf).amin(1)
        equal_N = spread_N <= self.min_spread * (1 + 1e-6)  # rewards of 0.8 and 0.9 in float32 differ by 0.1 and 2e-8
        if self.keep_return_bounds is None:
            return equal_N, torch.ones_like(equal_N)
        low, high = self.keep_return_bounds
        mean_N = rewards.returns_NG.nanmean(1)
        return equal_N, (mean_N > low) & (mean_N < high)

    def _advantages(self, rewards: GroupRewards, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Advantages float64[N, G, K] of K rewards each, and the completions to write, bool[N, G]."""
        num_groups = len(rewards.scored_NG)
        # Keeps groups with enough valid completions, a mean within the bounds and, if required, unequal rewards.
        keep_N = rewards.scored_NG.sum(1) >= self.min_group_size
        equal_N, within_N = self._rules(rewards)
        if self.reward_weights is not None:
            sums_NG = self._decoupled(rewards, td)
            equal_N = (sums_NG.nan_to_num(0.0) == 0).all(1)
        self.counters["zero_variance"] += int((equal_N & keep_N).sum())
        keep_N &= within_N
        if self.on_zero_variance == "drop":
            keep_N &= ~equal_N
        # NaN: no part in the std of scale="batch"
        values_NC = rewards.values_NC if self.reward_weights is None else sums_NG
        advantage_NC = values_NC.masked_fill(~keep_N.unsqueeze(1), torch.nan)
        written = int(keep_N.sum())
        batch = self._of_all(advantage_NC.flatten()) if self._uses_batch else None
        if self.reward_weights is not None:
            batch = batch[~batch.isnan()]
            std = batch.std() if len(batch) > 1 else batch.new_zeros(())
            advantage_NC = (advantage_NC - batch.mean()) / (std + self.eps) if std else advantage_NC * 0.0
        elif written:
            advantage_NC = group_advantage(advantage_NC, scale=self.scale, eps=self.eps, batch=batch)
        self.counters["failed"] += int(rewards.failed_NG.sum())
        self.counters["completed"] += num_groups
        self.counters["written"] += written
        self.counters["dropped"] += num_groups - written
        if self.verbose:
            _log.info(
                "MCAdvantage: %d groups written, %d dropped; so far %s.", written, num_groups - written, self.counters
            )
        # With trajectory_return there is one value per trajectory, which all its rewards share.
        advantage_NGC = advantage_NC.view(*rewards.scored_NG.shape, -1)
        return advantage_NGC.expand_as(rewards.rewards_NGK), keep_N.unsqueeze(1) & rewards.scored_NG

    def _decoupled(self, rewards: GroupRewards, td: TensorDictBase) -> Tensor:
        """The weighted sum of the advantages of each reward alone, float64[N, G] (GDPO)."""
        sums_NG = torch.zeros_like(rewards.returns_NG)
        for key, weight in self.reward_weights.items():
            column = self._get(td, key)
            if isinstance(column, list) or column.numel() != len(td) or rewards.rewards_NGK.shape[-1] != 1:
                raise ShapeError(
                    f"MCAdvantage: reward_weights needs one value of {key!r} per conversation, in one row."
                )
            own_NG = column.reshape(-1).to(rewards.returns_NG)[rewards.place_NGS.squeeze(-1)]
            own_NG = own_NG.masked_fill(~rewards.scored_NG, torch.nan)  # absent where it does not apply
            sums_NG += weight * group_advantage(own_NG, scale=self.scale, eps=self.eps).nan_to_num(0.0)
        return sums_NG.masked_fill(~rewards.scored_NG, torch.nan)

    def _groups(self, td: TensorDictBase) -> list[Group]:
        rows = td.batch_size[0]
        versions = None if self.policy_version_key is None else td.get(self.policy_version_key, None)
        key = self.prompt_key or ("query" if td.get("group_id", None) is None else "group_id")
        prompts, versions, seats = (
            None if c is None else row_values(c, rows, "MCAdvantage")
            for c in (self._get(td, key), versions, td.get(SEAT, None))
        )
        if seats is not None:
            prompts = list(zip(prompts, seats, strict=True))
        return list(zip(prompts, versions or [None] * rows, strict=True))

    def _get(self, td: TensorDictBase, key: NestedKey) -> Any:
        """A column, or a list of rows if their lengths differ."""
        try:
            value = td.get(key, None)
        except RuntimeError:  # rows of a lazy stack that cannot be stacked
            value = None
        return required(td, key, "MCAdvantage", as_list=True) if value is None else value

    def state_dict(self) -> dict[str, Any]:
        """The counters and the queue."""
        return {"counters": dict(self.counters), **self._queue.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters |= state["counters"]
        self._queue.load_state_dict(state)


def _with_entry(td: TensorDictBase, key: NestedKey, value: Tensor | list[Tensor]) -> TensorDictBase:
    """A shallow copy of ``td`` with one more entry, in new containers along its path; ``td`` does not change."""
    if isinstance(value, list):  # ragged, such as rewards per token: each row gets its own entry
        return LazyStackedTensorDict(*(row.copy().set(key, own) for row, own in zip(td.unbind(0), value, strict=True)))
    if type(td) is not TensorDict:
        return td.copy().set(key, value)
    name, rest = (key, ()) if isinstance(key, str) else (key[0], tuple(key[1:]))
    entries = dict(td.items())
    if rest:
        inner = entries.get(name)
        inner = TensorDict({}, batch_size=td.batch_size, device=td.device) if inner is None else inner
        value = _with_entry(inner, rest, value)
    entries[name] = value if td.device is None else value.to(td.device)
    return new_tensordict(entries, td.batch_size, td.device)
