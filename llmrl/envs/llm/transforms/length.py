"""Handling of long answers: a penalty past a budget, DAPO's soft punishment, or no loss on truncated answers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import inner, required, rewrap
from llmrl.envs.llm.completions import ScoringTransform
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, check_at_least
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.rows import num_real_ids


class _LengthReward(ScoringTransform, ABC):
    """Adds a function of the length of the response to the existing reward."""

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        missing = "append it after the transform that writes the reward"
        reward = required(next_td, "reward", type(self).__name__, missing)
        length_B = response_lengths(td, type(self).__name__).to(reward.device)
        extra_B = self._extra(length_B.to(reward.dtype))
        extra = extra_B.new_zeros(reward.shape)
        # With one reward per token, changes the last one. The size is not -1, which fails for a batch without rows.
        extra.view(len(extra), reward.shape[1:].numel())[:, -1] = extra_B
        return next_td.set("reward", reward + extra)

    @abstractmethod
    def _extra(self, length_B: Tensor) -> Tensor:
        """The number to add, float32[B]."""


class LengthPenalty(_LengthReward):
    """Subtracts ``coef`` from the reward for every token of the response past ``budget``.

    Reads   ("tokens", "response")  int64[B, ragged], or padded with ("masks", "all_attention_mask"): of this turn
    Writes  "reward"                float32[B, 1, 1], in the ``next`` tensordict
    Raises  ConfigError for a budget below 1 or a negative coef, MissingKeyError without a reward

    >>> LengthPenalty(budget=4, coef=0.25)._extra(torch.tensor([3.0, 6.0])).tolist()
    [-0.0, -0.5]
    """

    def __init__(self, budget: int, coef: float = 1e-3):
        super().__init__()
        check_at_least("LengthPenalty", 1, budget=budget)
        check_at_least("LengthPenalty", 0, coef=coef)
        self.budget = budget
        self.coef = coef

    def _extra(self, length_B: Tensor) -> Tensor:
        return -self.coef * (length_B - self.budget).clamp(min=0)


class OverlongShaping(_LengthReward):
    """DAPO's soft overlong punishment: 0 up to ``max_length - buffer`` tokens, ``-penalty`` from ``max_length`` on.

    Reads, Writes, Raises  as `LengthPenalty`; ConfigError unless 0 < buffer <= max_length

    In between it falls linearly: penalty * ((max_length - buffer) - length) / buffer.
    Source: DAPO (arXiv:2503.14476), eq. 13.

    >>> OverlongShaping(max_length=20, buffer=4)._extra(torch.tensor([15.0, 16.0, 17.0, 20.0, 25.0])).tolist()
    [0.0, 0.0, -0.25, -1.0, -1.0]
    """

    def __init__(self, max_length: int, buffer: int, penalty: float = 1.0):
        super().__init__()
        if not 0 < buffer <= max_length or penalty < 0:
            raise ConfigError(
                "OverlongShaping: needs 0 < buffer <= max_length and a penalty that is not negative: got "
                f"buffer={buffer}, max_length={max_length}, penalty={penalty}."
            )
        self.max_length = max_length
        self.buffer = buffer
        self.penalty = penalty

    def _extra(self, length_B: Tensor) -> Tensor:
        return self.penalty * ((self.max_length - self.buffer - length_B) / self.buffer).clamp(-1, 0)


class MaskTruncated(Transform):
    """Excludes truncated answers from the loss; their rewards still count in the mean of their group.

    Reads   "stop_reason"                    int64[B]
            ("masks", "all_assistant_mask")  bool ragged[T] or [B, T]
    Writes  ("masks", "all_assistant_mask")  False in rows that ended with LENGTH or ABORT, in a copy of ``td``
    Raises  MissingKeyError if either is missing

    A buffer's write transform (``inv``). In a row with several turns the stop reason of the last turn counts. DAPO
    calls it overlong filtering (arXiv:2503.14476, section 3.4).

    >>> from tensordict import TensorDict
    >>> masks = TensorDict(all_assistant_mask=torch.tensor([[False, True], [False, True]]), batch_size=[2])
    >>> batch = TensorDict(masks=masks, stop_reason=torch.tensor([StopReason.EOS, StopReason.LENGTH]), batch_size=[2])
    >>> MaskTruncated().inv(batch)["masks", "all_assistant_mask"].tolist()
    [[False, True], [False, False]]
    """

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        reason_B, masks = (required(td, key, "MaskTruncated") for key in ("stop_reason", "masks"))
        # Keeps the rewards: without them the mean of the group would cover only the finished answers.
        cut_B = (reason_B == StopReason.LENGTH) | (reason_B == StopReason.ABORT)
        if not bool(cut_B.any()):
            return td
        td = shallow_copy(td)
        td.set("masks", _without_assistant(masks, cut_B.flatten()))
        return td


def response_lengths(td: TensorDictBase, who: str) -> Tensor:
    """Tokens that the policy wrote in this turn, int64[B]."""
    response = required(td, ("tokens", "response"), who, as_list=True)
    return torch.tensor(num_real_ids(response, td.get(("masks", "all_attention_mask"), None, as_list=True)))


def _without_assistant(masks: TensorDictBase, cut_B: Tensor) -> TensorDictBase:
    held = inner(masks)
    if isinstance(held, LazyStackedTensorDict):
        rows = list(held.unbind(0))
        for number in cut_B.nonzero().flatten().tolist():
            untrained = torch.zeros_like(rows[number].get("all_assistant_mask"))
            rows[number] = shallow_copy(rows[number]).set("all_assistant_mask", untrained)
        changed = LazyStackedTensorDict(*rows)
    else:
        changed = shallow_copy(held)
        mask_BT = held.get("all_assistant_mask")
        changed.set("all_assistant_mask", mask_BT & ~cut_B.to(mask_BT.device)[:, None])
    return rewrap(masks, changed)
