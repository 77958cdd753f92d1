"""Groups of completions of one prompt: advantages, the queue, the choice among candidates, and a quota.

N groups, G completions of each. `MCAdvantage` puts these parts together.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from llmrl.data.ragged.padding import pad_rows
from llmrl.data.ragged.tensordicts import required
from llmrl.data.replay_buffers.storages.row_list import Row, pack, unpack
from llmrl.envs.transforms.base import Transform
from llmrl.errors import DataError, ShapeError
from llmrl.objectives.llm.settings import Scale

Advantages = Callable[[Tensor], Tensor]
_log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------------- arithmetic


@torch.no_grad()
def group_advantage(
    rewards_NG: Tensor, *, scale: Scale | Advantages = "group", eps: float = 1e-6, batch: Tensor | None = None
) -> Tensor:
    """The advantage of each completion over its group, float64[N, G].

    Reads    float[N, G] or [G]; NaN is an absent completion: it counts in no mean, and its advantage is NaN
    Returns  exactly 0 for a whole group when its rewards are equal, for any ``eps`` (except "raw"); the arithmetic
             is float64

    With R the reward, mean and std over the group, and n completions in it:

    | ``scale`` | advantage | known as |
    |---|---|---|
    | ``"group"`` | (R - mean) / (std + eps), std with n - 1 | GRPO (arXiv:2402.03300) |
    | ``"population"`` | the same, std with n | |
    | ``"clamp"`` | (R - mean) / max(std, eps), std with n - 1 | |
    | ``"none"`` | R - mean | Dr. GRPO (arXiv:2503.20783) |
    | ``"loo"`` | R - mean of the others | RLOO (arXiv:2402.14740) |
    | ``"loo_std"`` | the same over (std of the others + eps), where that std is above 0 | |
    | ``"batch"`` | (R - mean) / (std over all N * G rewards + eps) | |
    | ``"max_rl"`` | (R - mean) / mean, for rewards that are not negative | MaxRL (arXiv:2602.02710) |
    | ``"raw"`` | R: the group is not a baseline, see `whitened` | REINFORCE++ (arXiv:2501.03262) |

    A function in place of a name gets the float64 rewards [N, G] and returns advantages of the same shape. ``batch``:
    rewards, those of all processes, for the std of "batch"; None: the given ones.

    >>> group_advantage(torch.tensor([1.0, 0.0, 0.5, 0.0]), scale="none").tolist()
    [0.625, -0.375, 0.125, -0.375]
    """
    if not callable(scale) and scale not in get_args(Scale):
        raise ValueError(f"group_advantage: scale must be one of {', '.join(get_args(Scale))}: got {scale!r}.")
    if rewards_NG.ndim not in (1, 2):
        raise ShapeError(f"group_advantage: rewards must have the shape [N, G] or [G]: got {list(rewards_NG.shape)}.")
    if rewards_NG.ndim == 1:
        return group_advantage(rewards_NG.unsqueeze(0), scale=scale, eps=eps, batch=batch).squeeze(0)
    rewards_NG = rewards_NG.to(torch.float64)
    if scale == "raw":
        return rewards_NG.clone()
    absent_NG = rewards_NG.isnan()
    if callable(scale):
        advantage_NG = scale(rewards_NG)
        if not isinstance(advantage_NG, Tensor) or advantage_NG.shape != rewards_NG.shape:
            got = list(advantage_NG.shape) if isinstance(advantage_NG, Tensor) else type(advantage_NG).__name__
            raise ShapeError(f"advantages: must have the shape of the rewards, {list(rewards_NG.shape)}: got {got}.")
        return advantage_NG.to(torch.float64).masked_fill(absent_NG, torch.nan)
    count_N1 = (~absent_NG).sum(1, keepdim=True).to(torch.float64)
    mean_N1 = rewards_NG.nansum(1, keepdim=True) / count_N1
    centred_NG = rewards_NG - mean_N1
    if scale == "batch":
        batch = rewards_NG if batch is None else batch.to(torch.float64)
        advantage_NG = centred_NG / (batch[~batch.isnan()].std() + eps)
    else:
        advantage_NG = _scaled(rewards_NG, centred_NG, mean_N1, count_N1, scale, eps)
    # Equal rewards can differ from their mean by a rounding error, which dividing by the std would amplify.
    lowest_N1 = rewards_NG.masked_fill(absent_NG, torch.inf).amin(1, keepdim=True)
    highest_N1 = rewards_NG.masked_fill(absent_NG, -torch.inf).amax(1, keepdim=True)
    return advantage_NG.masked_fill((lowest_N1 >= highest_N1) & ~absent_NG, 0.0)


def _scaled(
    rewards_NG: Tensor, centred_NG: Tensor, mean_N1: Tensor, count_N1: Tensor, scale: Scale, eps: float
) -> Tensor:
    squares_N1 = centred_NG.square().nansum(1, keepdim=True)
    if scale in ("group", "clamp", "population"):
        std_N1 = (squares_N1 / (count_N1 if scale == "population" else count_N1 - 1)).sqrt()
        return centred_NG / (std_N1.clamp(min=eps) if scale == "clamp" else std_N1 + eps)
    if scale == "max_rl":
        if bool((rewards_NG < 0).any()):
            raise ValueError("group_advantage: max_rl divides by the mean reward, so rewards must not be negative.")
        return centred_NG / mean_N1
    if scale == "none":
        return centred_NG
    loo_NG = centred_NG * (count_N1 / (count_N1 - 1))  # R - mean of the others
    if scale == "loo":
        return loo_NG
    # sum of squares around the mean of the others: all squares, minus one's own, minus the shift of the mean
    others_NG = squares_N1 - centred_NG * loo_NG
    std_NG = (others_NG / (count_N1 - 2)).sqrt()
    differ_NG = others_NG > 1e-12 * squares_N1  # below is rounding error: the others are equal
    return torch.where(differ_NG & (count_N1 > 2), loo_NG / (std_NG + eps), loo_NG)


@torch.no_grad()
def whitened(values_N: Tensor, weights_N: Tensor, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(value - mean) / std, float64[N], where value i counts ``weights_N[i]`` times; 0 for all if they are equal.

    With the number of trained tokens as weight, mean and std are those over the tokens of a batch, as in REINFORCE++
    (arXiv:2501.03262). A value of weight 0 affects neither. ``batch``: values and weights, those of all processes, that
    mean and std are taken from; None: the given ones.

    >>> whitened(torch.tensor([1.0, 0.0]), torch.tensor([1, 3])).tolist()
    [1.7320508075688774, -0.57735026918962...]
    """
    values_N = values_N.to(torch.float64)
    all_M, weights_M = (part.to(torch.float64) for part in batch or (values_N, weights_N))
    counted_M = weights_M > 0
    if not bool(counted_M.any()) or bool(all_M[counted_M].amin() >= all_M[counted_M].amax()):
        return torch.zeros_like(values_N)
    share_M = weights_M / weights_M.sum()
    mean = (share_M * all_M).sum()
    return (values_N - mean) / (share_M * (all_M - mean).square()).sum().clamp(min=1e-8).sqrt()


# ---------------------------------------------------------------------------------------------- rewards, by their group


class GroupRewards(NamedTuple):
    """The rewards of B rows as those of N groups of G trajectories of S rows, each with L rewards; K = S L.

    rows         the rewards as they were; a list if they differ in length
    place_NGS    the row of each step; -1: there is none
    rewards_NGK  float64; NaN where there is none, and all of a trajectory that failed
    failed_NG    a reward is NaN or infinite: the trajectory's other rewards cannot be trusted either
    scored_NG    there is a trajectory, and it did not fail
    returns_NG   its return; NaN elsewhere
    values_NC    what is compared in a group: the returns, or without ``trajectory_return`` all rewards
    """

    rows: Tensor | list[Tensor]
    place_NGS: Tensor
    rewards_NGK: Tensor
    failed_NG: Tensor
    scored_NG: Tensor
    returns_NG: Tensor
    values_NC: Tensor

    @classmethod
    def of(
        cls, rows: Tensor | list[Tensor], place_NGS: Tensor, trajectory_return: Literal["sum", "max", "mean"] | None
    ) -> GroupRewards:
        if isinstance(rows, list) and len({row.shape for row in rows}) == 1:
            rows = torch.stack(rows)
        # float64: in float32, close rewards would lose most digits in the difference to the mean.
        if isinstance(rows, Tensor):
            rewards_BL = rows.detach().to(torch.float64).reshape(len(rows), -1)
            broken_B = ~rewards_BL.isfinite().all(-1)
        else:
            flat = [row.detach().to(torch.float64).flatten() for row in rows]
            rewards_BL = pad_rows(flat, value=torch.nan)
            broken_B = torch.tensor([not row.isfinite().all() for row in flat]).to(rewards_BL.device)
        place_NGS = place_NGS.to(rewards_BL.device)
        if place_NGS.numel() > len(rewards_BL):  # one more row of NaN, which -1 finds
            rewards_BL, broken_B = pad(rewards_BL, (0, 0, 0, 1), value=torch.nan), pad(broken_B, (0, 1))
        rewards_NGK = rewards_BL[place_NGS].flatten(2)
        scored_NG = place_NGS[..., 0] >= 0
        failed_NG = torch.zeros_like(scored_NG)
        if bool(broken_B.any()):
            failed_NG = broken_B[place_NGS].any(-1)
            scored_NG &= ~failed_NG
            rewards_NGK = rewards_NGK.masked_fill(failed_NG.unsqueeze(-1), torch.nan)
        if rewards_NGK.shape[-1] == 1:
            returns_NG = rewards_NGK.squeeze(-1)
        elif trajectory_return == "max":
            returns_NG = rewards_NGK.nan_to_num(-torch.inf).amax(-1).masked_fill(~scored_NG, torch.nan)
        else:
            returns_NG = rewards_NGK.nanmean(-1) if trajectory_return == "mean" else rewards_NGK.nansum(-1)
            returns_NG = returns_NG.masked_fill(~scored_NG, torch.nan)
        values_NC = rewards_NGK.flatten(1) if trajectory_return is None else returns_NG
        return cls(rows, place_NGS, rewards_NGK, failed_NG, scored_NG, returns_NG, values_NC)


def consecutive_rows(lengths: Sequence[Sequence[int]]) -> Tensor:
    """``place_NGS`` of rows that follow each other: those of each trajectory of each group; -1 where there is none.

    >>> consecutive_rows([[1, 2], [1]]).tolist()
    [[[0, -1], [1, 2]], [[3, -1], [-1, -1]]]
    """
    size, steps, number = max(map(len, lengths)), max(map(max, lengths)), count()
    padded = [[*group, *[0] * (size - len(group))] for group in lengths]
    return torch.tensor(
        [[[next(number) if step < own else -1 for step in range(steps)] for own in group] for group in padded]
    )


# --------------------------------------------------------------------------------------------------------- waiting

Group = tuple[Hashable, Hashable]  # the prompt, the policy version (None if there is none)


class Trajectory(NamedTuple):
    """The steps of one completion: their rows, and the rewards of each row, float64."""

    rows: list[Row]
    rewards: list[Tensor]


class GroupQueue:
    """Trajectories that wait for the others of their group, in the order in which the groups began.

    Once a group has ``size`` completions, ``choose`` selects those to write, or returns None to wait for more; at
    ``max_size`` the group is given up. Completions of a group that was closed earlier are ignored.

    Writes  ``counters``: "evicted", "late", "queued", "queued_trajectories"
    Calls   ``choose(members)``; ``give_up(members)`` at ``max_size``
    """

    def __init__(
        self,
        size: int,
        max_size: int,
        *,
        max_queued_groups: int,
        counters: dict[str, int | float],
        choose: Callable[[list[Trajectory]], list[Trajectory] | None],
        give_up: Callable[[list[Trajectory]], None],
    ):
        self.size, self.max_size = size, max_size
        self.max_queued_groups = max_queued_groups
        self.counters = counters
        self._choose, self._give_up = choose, give_up
        self._waiting: OrderedDict[Group, list[Trajectory]] = OrderedDict()
        self._open: OrderedDict[Group, Trajectory] = OrderedDict()  # steps whose trajectory has not ended yet
        self._closed: OrderedDict[Group, int] = OrderedDict()  # number of completions still to come

    def __bool__(self) -> bool:
        return bool(self._waiting or self._open)

    def knows(self, groups: Iterable[Group]) -> bool:
        """True if a completion of these groups is waiting."""
        return not (self._waiting.keys() | self._open.keys()).isdisjoint(groups)

    def add_step(self, group: Group, row: Row, reward: Tensor, *, done: bool) -> Trajectory | None:
        """Adds a step; returns its trajectory if the step ends it, else None."""
        trajectory = self._open.setdefault(group, Trajectory([], []))
        trajectory.rows.append(row)
        trajectory.rewards.append(reward)
        return self._open.pop(group) if done else None

    def complete(self, ended: Sequence[tuple[Group, Trajectory]]) -> list[list[Trajectory]]:
        """Queues trajectories; returns the groups that are now complete."""
        whole = []
        for group, trajectory in ended:
            if group in self._closed:  # written or given up; after its last completion the key is free again
                self.counters["late"] += 1
                self._closed[group] -= 1
                if not self._closed[group]:
                    del self._closed[group]
                continue
            members = self._waiting.setdefault(group, [])
            members.append(trajectory)
            if len(members) < self.size:
                continue
            if (chosen := self._choose(members)) is not None:
                whole.append(chosen)
                self._close(group)
            elif len(members) == self.max_size:
                self._give_up(members)
                self._close(group)
        while len(self._waiting) > self.max_queued_groups:
            group, members = self._waiting.popitem(last=False)
            self.counters["evicted"] += 1
            _log.warning(
                f"MCAdvantage: group {group} was given up with {len(members)} of {self.size} completions, because "
                f"more than max_queued_groups={self.max_queued_groups} groups are waiting."
            )
        while len(self._open) > self.max_queued_groups * self.max_size:
            self._open.popitem(last=False)
            self.counters["evicted"] += 1
        self.counters["queued"] = len(self._waiting)
        self.counters["queued_trajectories"] = sum(map(len, self._waiting.values()))
        return whole

    def clear(self) -> None:
        for waiting in (self._waiting, self._open, self._closed):
            waiting.clear()
        self.counters |= {"queued": 0, "queued_trajectories": 0}

    def _close(self, group: Group) -> None:
        left = self.max_size - len(self._waiting.pop(group))
        if left > 0:  # negative if a loaded state had larger groups
            self._closed[group] = left
            if len(self._closed) > self.max_queued_groups:
                self._closed.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "queue": [(group, [_pack(member) for member in members]) for group, members in self._waiting.items()],
            "open": [(group, _pack(trajectory)) for group, trajectory in self._open.items()],
            "closed": list(self._closed.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = OrderedDict(
            (group, [_unpack(member) for member in members]) for group, members in state["queue"]
        )
        self._open = OrderedDict((group, _unpack(trajectory)) for group, trajectory in state["open"])
        self._closed = OrderedDict(state["closed"])


def _pack(trajectory: Trajectory) -> dict[str, Any]:
    return {"rows": pack(trajectory.rows), "rewards": [reward.clone() for reward in trajectory.rewards]}


def _unpack(state: dict[str, Any]) -> Trajectory:
    return Trajectory(unpack(state["rows"]), [reward.clone() for reward in state["rewards"]])


# ---------------------------------------------------------------------------------------- choosing among candidates

CandidateSelector = Callable[[TensorDictBase, int], Tensor | Sequence[int] | None]


def select_spread(candidates: TensorDictBase, size: int) -> Tensor | None:
    """Indices of the best and the worst half, int64[size]; None if all returns are equal, to wait for more.

    Reads   "return"  float64[N], finite

    The middle teaches least: of N candidates, these ``size`` have the largest variance. With an odd ``size`` the better
    half is the larger one; among equal returns the earliest are taken.

    >>> from tensordict import TensorDict
    >>> select_spread(TensorDict({"return": torch.tensor([0.0, 0.5, 1.0, 0.4])}, batch_size=[4]), 2).tolist()
    [0, 2]
    """
    returns_N = candidates.get("return")
    if bool(returns_N.amin() >= returns_N.amax()):
        return None
    best_first_N = torch.argsort(returns_N, descending=True, stable=True)
    worst_first_N = torch.argsort(returns_N, stable=True)
    num_best = (size + 1) // 2
    # Two stable sorts: one sort read backwards would take the latest of equal returns.
    best = best_first_N[:num_best].tolist()
    worst = [index for index in worst_first_N.tolist() if index not in best][: size - num_best]
    return torch.tensor(sorted(best + worst))


def selected_indices(selected: Tensor | Sequence[int], size: int, num_candidates: int) -> list[int]:
    """The indices of a selection, which may be a mask. Raises  DataError unless they are ``size`` different rows"""
    selected = torch.as_tensor(selected)
    if selected.dtype == torch.bool:
        selected = selected.nonzero()
    indices = selected.flatten().tolist()
    if len(set(indices)) != size or len(indices) != size or not all(0 <= index < num_candidates for index in indices):
        raise DataError(
            f"MCAdvantage: candidate_selector must choose {size} different rows of {num_candidates}, or return None: "
            f"got {indices}."
        )
    return indices


# ------------------------------------------------------------------------------------------------ limiting the groups


class GroupQuota(Transform):
    """Lets at most ``num_groups`` groups into a buffer until `reset`.

    Reads   "group_id"  int64[B]; all rows of a group in one batch, as `MCAdvantage` writes them; None: no rows
    Returns from ``inv``: the rows of the first groups, or None if the quota is full
    Raises  MissingKeyError for a batch without groups

    Rows written to a buffer pass its transforms from last to first, so the quota precedes the one that makes groups:
    ``ReplayBuffer(transform=Compose(quota, MCAdvantage(8, on_zero_variance="drop")))``. Surplus groups are counted and
    left out: by the next step the weights have changed. Collecting until ``missing`` is 0 is
    dynamic sampling. Source: DAPO (arXiv:2503.14476), section 3.2.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> quota = GroupQuota(2)
    >>> quota.inv(TensorDict(group_id=torch.tensor([3, 3]), batch_size=[2]))["group_id"].tolist(), quota.missing
    ([3, 3], 1)
    >>> quota.inv(TensorDict(group_id=torch.tensor([4, 5, 4, 5]), batch_size=[4]))["group_id"].tolist(), quota.surplus
    ([4, 4], 1)
    """

    def __init__(self, num_groups: int):
        super().__init__()
        if num_groups < 1:
            raise ValueError(f"GroupQuota: num_groups must be at least 1: got {num_groups}.")
        self.num_groups = num_groups
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

    def inv(self, td: TensorDictBase | None) -> TensorDictBase | None:
        if td is None:
            return None
        groups = required(td, "group_id", "GroupQuota").flatten()
        order = list(dict.fromkeys(groups.tolist()))
        taken = order[: self.missing]
        self.written += len(taken)
        self.surplus += len(order) - len(taken)
        if len(taken) == len(order):
            return td
        return td[(groups[:, None] == groups.new_tensor(taken)).any(1)] if taken else None
