"""PPO with a critic: advantages from the values of each token (GAE), and the loss of the critic.

The policy's loss is `GRPOLoss` with one advantage per token. The value of a token is the critic's output at the token
before it: the expected return before the token was sampled.

Shapes: B conversations, T tokens; ``mask_BT`` is True on the trained tokens. All others are observations (prompts, tool
results, users' messages), which the policy did not choose.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import PaddedBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.metric import Metric

__all__ = ["ValueLoss", "ValueLossOutput", "gae", "value_loss"]

VALUES, RETURNS = ("values", "full"), ("returns", "full")


def gae(
    value_BT: Tensor,
    reward_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    last_value_B: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates of the trained tokens, float64[B, T]; 0 elsewhere.

    With V_k and r_k the value and reward of the k-th trained token of a row, observations left out:

        A_k = sum_j (gamma lam)^j d_{k+j}     d_k = r_k + gamma V_{k+1} - V_k

    ``last_value_B`` follows the last trained token; None: 0, the conversation has ended. The return that a critic
    learns is A + V. An observation between two tokens neither discounts nor ends anything.

    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.

    >>> mask = torch.tensor([[False, True, False, True]])
    >>> gae(torch.tensor([[9.0, 0.5, 9.0, 0.25]]), torch.tensor([[0.0, 0.0, 0.0, 1.0]]), mask, lam=0.5)
    tensor([[0.0000, 0.1250, 0.0000, 0.7500]], dtype=torch.float64)
    """
    order_BT = (~mask_BT).to(torch.uint8).argsort(dim=-1, stable=True)  # trained tokens first, in their order
    value_BK, reward_BK = (
        column.double().masked_fill(~mask_BT, 0.0).gather(-1, order_BT) for column in (value_BT, reward_BT)
    )
    next_BK = torch.cat([value_BK[:, 1:], torch.zeros_like(value_BK[:, :1])], -1)
    if last_value_B is not None:
        place_T = torch.arange(mask_BT.shape[-1], device=mask_BT.device)
        is_last_BK = place_T == mask_BT.sum(-1, keepdim=True) - 1
        next_BK = torch.where(is_last_BK, last_value_B.double().unsqueeze(-1), next_BK)
    sum_BK = reward_BK + gamma * next_BK - value_BK
    # Sums over 1, 2, 4 ... tokens, each from two of half the length: no loop over tokens.
    reach = 1
    while reach < mask_BT.shape[-1]:
        sum_BK = sum_BK + (gamma * lam) ** reach * nn.functional.pad(sum_BK[:, reach:], (0, reach))
        reach *= 2
    return torch.zeros_like(sum_BK).scatter(-1, order_BT, sum_BK).masked_fill(~mask_BT, 0.0)


def token_values(after_BT: Tensor) -> Tensor:
    """The value of each token, from a critic's outputs after each token: the one before it; 0 for the first token."""
    return torch.cat([torch.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], -1)


def value_loss(value_BT: Tensor, old_BT: Tensor, return_BT: Tensor, *, clip: float | None = None) -> Tensor:
    """(V - R)^2 / 2 per token; with ``clip`` the larger of it and the same for V held within ``clip`` of the old value.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; the clip is that of the authors' code, described by Engstrom
    et al. 2020 (arXiv:2005.12729), section 3.

    >>> value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.3200])
    """
    error_BT = (value_BT - return_BT).square()
    if clip is not None:
        held_BT = old_BT + (value_BT - old_BT).clamp(-clip, clip)
        error_BT = torch.maximum(error_BT, (held_BT - return_BT).square())
    return error_BT / 2


@shows_values
class ValueLossOutput(TensorClass["nocast"]):
    """``loss_value``, to differentiate, and metrics: means over the trained tokens of the step; ``tokens`` counts."""

    loss_value: Tensor
    clip_fraction: Tensor | None = None  # tokens whose gradient the clip removes
    tokens: Tensor | None = None


class ValueLoss(LossModule):
    """The loss of a critic: its values against returns, a mean over the trained tokens of the step.

    Reads   ("tokens", "full"), ("masks", "all_assistant_mask"), ("masks", "trained_from")  as `GRPOLoss`
            ("values", "full"), ("returns", "full")  float32 ragged[T]  of before the first update; what it should learn
    Calls   critic(ids int64[B, T], attention mask bool[B, T]) -> float[B, T], the value after each token
    Returns ValueLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  MissingKeyError, ShapeError for a column that does not fit the tokens; DataError for NaN on a trained token

    clip    see `value_loss`; None: no clip
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "response": reading.RESPONSE,
        "attention_mask": reading.ATTENTION_MASK,
        "assistant_mask": reading.ASSISTANT_MASK,
        "value": VALUES,
        "return": RETURNS,
    }
    metrics: ClassVar = {
        "loss_value": Metric("critic/loss", "half the squared error of the critic's values", label="critic"),
        "clip_fraction": Metric("critic/clip_frac", "share of trained tokens whose value the clip holds"),
    }

    def __init__(self, critic: nn.Module, *, clip: float | None = None):
        super().__init__()
        if clip is not None and clip <= 0:
            raise ConfigError(f"ValueLoss: clip must be above 0, or None: got {clip}.")
        self.critic, self.clip = critic, clip

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts the trained tokens in the whole batch of an optimizer step, on this rank."""
        return StepCounts.of(self._read(td)[1])

    @torch.no_grad()
    def values(self, td: TensorDictBase) -> Tensor:
        """float[B, T]: the value of each token; ragged rows are padded on the right."""
        return self._values(self._read(td)[0])

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> ValueLossOutput:
        batch, mask_BT = self._read(td)
        counts = normalizer or StepCounts.of(mask_BT)
        remedy = "score the batch with the critic again"
        old_BT, return_BT = (
            batch.finite(
                td, getattr(self.tensor_keys, name), mask_BT, missing=f"no {name} of the critic", remedy=remedy
            )
            for name in ("value", "return")
        )
        value_BT = self._values(batch)
        error_BT = value_loss(value_BT, old_BT.to(value_BT), return_BT.to(value_BT), clip=self.clip)
        weight_BT = fn.token_weights(mask_BT, "token", counts, dtype=value_BT.dtype)

        def mean(each_BT: Tensor) -> Tensor:
            return (each_BT.masked_fill(~mask_BT, 0.0) * weight_BT).sum()

        is_clipped_BT = torch.zeros_like(mask_BT)
        if self.clip is not None:
            is_clipped_BT = 2 * error_BT.detach() > (value_BT.detach() - return_BT.to(value_BT)).square()
        return ValueLossOutput(
            loss_value=mean(error_BT),
            clip_fraction=mean(is_clipped_BT.to(error_BT)),
            tokens=mask_BT.sum().to(error_BT),
            batch_size=[],
        )

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        log_probs = placeholders(device)["log_probs"]
        return {"values": log_probs.clone(), "returns": log_probs}

    def _read(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        batch = PaddedBatch.read(td, self.tensor_keys, reader="ValueLoss")
        return batch, batch.trained_mask(td, self.tensor_keys, "sft")

    def _values(self, batch: PaddedBatch) -> Tensor:
        return token_values(self.critic(batch.input_ids, batch.attention_mask))
