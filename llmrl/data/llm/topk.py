"""`TopKRewardSelector`: writes the best answers to each prompt into a buffer, and drops the others."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import required, row_values
from llmrl.data.replay_buffers.storages.row_list import Row, from_rows, pack, to_rows, unpack
from llmrl.errors import DataError

_log = logging.getLogger(__name__)


class _Conversation(NamedTuple):
    rows: list[Row]
    reward: float


class TopKRewardSelector:
    """Collects the conversations of a prompt until it has enough turns, then writes the best ones.

    Reads   prompt_key   B strings, or int64[B]; in a conversation of several turns, the first one counts
            rewards_key  float[B, ...]; the reward of a conversation is the sum over its turns
            done_key     bool[B, 1]
    Returns from ``inv``: the turns of the chosen conversations [N], the best one first, or None
    Raises  ValueError for settings that can select nothing, DataError if no turn is done, MissingKeyError

    Once a prompt has ``total_dialog_turns`` turns, up to ``topk_size`` conversations are written: the best of those
    strictly above the median reward, so none if all are equal. Conversations whose reward is NaN or infinite are left
    out. A row is one turn: in a flat batch a conversation ends with a turn that is done, in a [B, T] batch each row is
    a conversation. Beyond ``max_queued_prompts`` the oldest prompt is dropped. In a buffer:
    ``ReplayBuffer(transform=TopKRewardSelector(5, 3))``.

    ``counters``: "prompts" decided, conversations "written", "dropped", "failed" and "evicted", prompts "queued" now.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict(
    ...     query=torch.zeros(5, dtype=torch.int64),
    ...     next=TensorDict(reward=torch.arange(5.0).view(5, 1, 1), done=torch.ones(5, 1, dtype=torch.bool)),
    ...     batch_size=[5],
    ... )
    >>> TopKRewardSelector(5, 3, prompt_key="query", verbose=False).inv(batch)["next", "reward"].flatten().tolist()
    [4.0, 3.0]
    """

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: NestedKey = ("text", "prompt"),
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        verbose: bool = True,
        *,
        max_queued_prompts: int = 1024,
    ):
        if total_dialog_turns < 2 or not 1 <= topk_size <= total_dialog_turns or max_queued_prompts < 1:
            raise ValueError(
                "TopKRewardSelector: total_dialog_turns must be at least 2 (a single one is never above the median), "
                "topk_size between 1 and that, and max_queued_prompts at least 1: got "
                f"{total_dialog_turns}, {topk_size} and {max_queued_prompts}."
            )
        self.total_dialog_turns = total_dialog_turns
        self.topk_size = topk_size
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.done_key = done_key
        self.verbose = verbose
        self.max_queued_prompts = max_queued_prompts
        names = ("prompts", "written", "dropped", "failed", "evicted", "queued")
        self.counters = dict.fromkeys(names, 0)
        self._queue: OrderedDict[Hashable, list[_Conversation]] = OrderedDict()
        self._open: tuple[Hashable, list[Row], float] | None = None  # unfinished at the end of a flat batch

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if 0 in td.batch_size:
            return None
        if not td.batch_dims:
            td = LazyStackedTensorDict(td)
        parts = td.unbind(0) if td.batch_dims > 1 else [td]
        chosen = []
        for part in parts:
            for prompt, conversation in self._conversations(part, flat=td.batch_dims == 1):
                self._queue.setdefault(prompt, []).append(conversation)
                if sum(len(one.rows) for one in self._queue[prompt]) >= self.total_dialog_turns:
                    chosen += self._best(self._queue.pop(prompt))
        while len(self._queue) > self.max_queued_prompts:
            _, given_up = self._queue.popitem(last=False)
            self.counters["evicted"] += len(given_up)
            _log.warning(
                f"TopKRewardSelector: {len(given_up)} conversations were dropped: more than "
                f"max_queued_prompts={self.max_queued_prompts} prompts are waiting."
            )
        self.counters["queued"] = len(self._queue)
        rows = [row for conversation in chosen for row in conversation.rows]
        return from_rows(rows) if rows else None

    def _conversations(self, td: TensorDictBase, *, flat: bool) -> list[tuple[Hashable, _Conversation]]:
        count = td.batch_size[0]
        done_T = [bool(row.any()) for row in self._get(td, self.done_key, as_list=True)]
        if not any(done_T) or not (flat or done_T[-1]):
            raise DataError(
                f"TopKRewardSelector: conversations must end: got {self.done_key!r} True in {sum(done_T)} of "
                f"{len(done_T)} turns{', but not in the last one of a [B, T] batch' if any(done_T) else ''}."
            )
        reward_T = [float(row.detach().double().sum()) for row in self._get(td, self.rewards_key, as_list=True)]
        prompts = row_values(self._get(td, self.prompt_key), count, "TopKRewardSelector")
        ended = []
        # A flat batch may end inside a conversation, whose beginning then waits for the next batch.
        prompt, rows, total = self._open or (None, [], 0.0)
        for row, own, reward, done in zip(to_rows(td), prompts, reward_T, done_T, strict=True):
            prompt = prompt if rows else own  # later turns have longer prompts: the first one identifies the group
            rows.append(row)
            total += reward
            if done:
                ended.append((prompt, _Conversation(rows, total)))
                rows, total = [], 0.0
        self._open = (prompt, rows, total) if rows else None
        return ended

    def _best(self, conversations: list[_Conversation]) -> list[_Conversation]:
        rewards = torch.tensor([conversation.reward for conversation in conversations], dtype=torch.float64)
        finite = rewards.isfinite()
        best: list[_Conversation] = []
        if bool(finite.any()):
            # If all rewards are equal, none is above the median and none is written: they teach nothing.
            median = torch.quantile(rewards[finite], 0.5)
            order = torch.argsort(rewards.masked_fill(~finite, -torch.inf), descending=True, stable=True)
            above = [index for index in order.tolist() if finite[index] and rewards[index] > median]
            best = [conversations[index] for index in above[: self.topk_size]]
        failed = int((~finite).sum())
        self.counters["prompts"] += 1
        self.counters["failed"] += failed
        self.counters["written"] += len(best)
        self.counters["dropped"] += len(conversations) - failed - len(best)
        if self.verbose:
            _log.info("TopKRewardSelector: %d of %d conversations written.", len(best), len(conversations))
        return best

    def _get(self, td: TensorDictBase, key: NestedKey, *, as_list: bool = False) -> Any:
        value = required(td, key, "TopKRewardSelector", as_list=as_list)
        return value.cpu() if isinstance(value, Tensor) else value

    def state_dict(self) -> dict[str, Any]:
        """The counters, the waiting conversations and the unfinished one."""
        waiting = [
            (prompt, [(pack(one.rows), one.reward) for one in conversations])
            for prompt, conversations in self._queue.items()
        ]
        started = None if self._open is None else (self._open[0], pack(self._open[1]), self._open[2])
        return {"counters": dict(self.counters), "queue": waiting, "open": started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counters = dict(state["counters"])
        self._queue = OrderedDict(
            (prompt, [_Conversation(unpack(rows), reward) for rows, reward in conversations])
            for prompt, conversations in state["queue"]
        )
        started = state["open"]
        self._open = None if started is None else (started[0], unpack(started[1]), started[2])
