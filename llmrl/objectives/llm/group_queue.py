"""Trajectories that wait for the others of their group. What is done with a whole group is `MCAdvantage`'s business."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from llmrl.data.replay_buffers.rows import Row, pack, unpack

__all__ = ["Group", "GroupQueue", "Trajectory"]

_log = logging.getLogger(__name__)

Group = tuple[Hashable, Hashable]  # the prompt, the policy version (None where there is none)


class Trajectory(NamedTuple):
    """The steps of one completion: their rows, and the rewards of each, float64."""

    rows: list[Row]
    rewards: list[Tensor]


Choose = Callable[[list[Trajectory]], list[Trajectory] | None]


class GroupQueue:
    """Groups by the completions that have come, in the order in which the groups began.

    A group is whole when ``size`` completions are there. With ``choose`` it has up to ``max_size`` of them: from
    ``size`` on ``choose`` is asked which are taken, None meaning that the queue goes on waiting; at ``max_size`` the
    group is given up. Completions of a group that was closed earlier are ignored.

    Writes  ``counters``: "evicted", "late", "queued", "queued_trajectories"
    Calls   ``choose(members)``; ``give_up(members)`` at ``max_size``
    """

    def __init__(
        self,
        size: int,
        *,
        max_queued_groups: int,
        counters: dict[str, int | float],
        max_size: int | None = None,
        choose: Choose | None = None,
        give_up: Callable[[list[Trajectory]], None] | None = None,
    ):
        self.size = size
        self.max_size = max_size
        self.max_queued_groups = max_queued_groups
        self.counters = counters
        self._choose = choose
        self._give_up = give_up
        self._waiting: OrderedDict[Group, list[Trajectory]] = OrderedDict()
        self._open: OrderedDict[Group, Trajectory] = OrderedDict()  # steps whose trajectory has not ended yet
        self._closed: OrderedDict[Group, int] = OrderedDict()  # how many completions of a closed group are to come

    def __bool__(self) -> bool:
        return bool(self._waiting or self._open)

    def knows(self, groups: Sequence[Group]) -> bool:
        """Whether anything of these groups waits."""
        return not (self._waiting.keys() | self._open.keys()).isdisjoint(groups)

    def add_step(self, group: Group, row: Row, reward: Tensor, *, done: bool) -> Trajectory | None:
        """The trajectory that this step ends, if it does."""
        trajectory = self._open.setdefault(group, Trajectory([], []))
        trajectory.rows.append(row)
        trajectory.rewards.append(reward)
        return self._open.pop(group) if done else None

    def complete(self, ended: Sequence[tuple[Group, Trajectory]]) -> list[list[Trajectory]]:
        """Queues trajectories; returns the groups that are whole now."""
        whole = []
        for group, trajectory in ended:
            if group in self._closed:
                self._ignore(group)
                continue
            members = self._waiting.setdefault(group, [])
            members.append(trajectory)
            if len(members) < self.size:
                continue
            if self._choose is None:
                whole.append(self._waiting.pop(group))
            elif (chosen := self._choose(members)) is not None:
                whole.append(chosen)
                self._close(group)
            elif len(members) == self.max_size:
                self._give_up(members)
                self._close(group)
        while len(self._waiting) > self.max_queued_groups:
            self._evict(*self._waiting.popitem(last=False))
        while len(self._open) > self.max_queued_groups * (self.max_size or self.size):
            self._open.popitem(last=False)
            self.counters["evicted"] += 1
        self.counters["queued"] = len(self._waiting)
        self.counters["queued_trajectories"] = sum(map(len, self._waiting.values()))
        return whole

    def clear(self) -> None:
        for waiting in (self._waiting, self._open, self._closed):
            waiting.clear()
        self.counters |= {"queued": 0, "queued_trajectories": 0}

    def _ignore(self, group: Group) -> None:
        self.counters["late"] += 1
        self._closed[group] -= 1
        if not self._closed[group]:
            del self._closed[group]

    def _close(self, group: Group) -> None:
        if left := self.max_size - len(self._waiting.pop(group)):
            self._closed[group] = left
            if len(self._closed) > self.max_queued_groups:
                self._closed.popitem(last=False)

    def _evict(self, group: Group, members: list[Trajectory]) -> None:
        self.counters["evicted"] += 1
        _log.warning(
            f"MCAdvantage: group {group} was given up with {len(members)} of {self.size} completions, because "
            f"more than max_queued_groups={self.max_queued_groups} groups wait."
        )

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
