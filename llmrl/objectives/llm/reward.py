"""The loss of a reward model: chosen answers get larger rewards than rejected ones."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.vision import has_images
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import PaddedBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.pairs import Pairs, read_pairs
from llmrl.objectives.metric import Metric

Level = Literal["sequence", "token"]


@shows_values
class RewardLossOutput(TensorClass["nocast"]):
    """``loss_reward``, to differentiate, and metrics: means over the pairs of the step; ``tokens`` is a count."""

    loss_reward: Tensor
    pairs_right: Tensor | None = None  # share of pairs whose chosen answer has the larger reward
    margin: Tensor | None = None  # chosen minus rejected reward
    chosen_reward: Tensor | None = None
    rejected_reward: Tensor | None = None
    tokens: Tensor | None = None  # tokens of the answers


class RewardLoss(LossModule):
    """-log sigmoid(r_chosen - r_rejected - margin) over pairs of answers to one prompt.

    Reads   ("tokens", "full"), "num_chosen", ("masks", "all_assistant_mask")   as `DPOLoss`
            "margin"  float32[B]  optional: by how much the rewards should differ
    Calls   reward_network(ids int64[C, T], attention mask bool[C, T]) -> float[C, T], the reward after each token
    Returns RewardLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  DataError for a pair with one answer that has no token, and for images; MissingKeyError

    level   "sequence": the reward after the last token. "token": the mean over all positions from the first one where
            the conversations differ; a conversation that has ended keeps its last reward. Such a model can also
            judge unfinished answers
    first_share  with "token", the weight of the loss at that first position; the mean has the rest. A mistake
            begins there, and counts little in a mean over the whole answer

    Source: Touvron et al. 2023, Llama 2 (arXiv:2307.09288), eqs. 1 and 2.
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "assistant_mask": reading.ASSISTANT_MASK,
        "num_chosen": "num_chosen",
        "margin": "margin",
    }
    metrics: ClassVar = {
        "pairs_right": Metric("preference/right_frac"),
        "margin": Metric("preference/margin"),
        "chosen_reward": Metric("preference/chosen_reward"),
        "rejected_reward": Metric("preference/rejected_reward"),
    }

    def __init__(self, reward_network: nn.Module, *, level: Level = "sequence", first_share: float = 0.0) -> None:
        super().__init__()
        if level not in get_args(Level):
            raise fn.unknown("RewardLoss: level", level, get_args(Level))
        if not 0 <= first_share <= 1 or (first_share and level != "token"):
            raise ConfigError(
                "RewardLoss: first_share must be within [0, 1], and 0 unless level='token': got "
                f"first_share={first_share}, level={level!r}."
            )
        self.reward_network, self.level, self.first_share = reward_network, level, first_share

    def placeholder(self, device: torch.device) -> dict[str, Tensor]:
        return {"num_chosen": torch.ones(1, dtype=torch.int64, device=device)}

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts tokens and pairs (as ``sequences``) in the whole batch of an optimizer step, on this rank."""
        return self._read(td).counts()

    @torch.no_grad()
    def pair_rewards(self, td: TensorDictBase) -> Tensor:
        """float32[B, 2]: the rewards of the chosen and the rejected answers."""
        batch = self._read(td).batch
        return _last(self._rewards(batch), batch)

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> RewardLossOutput:
        pairs = self._read(td)
        batch = pairs.batch
        mean = partial(pairs.mean, counts=normalizer or pairs.counts())
        reward_CT = self._rewards(batch)
        reward_B2 = _last(reward_CT, batch)
        margin_B = td.get(self.tensor_keys.margin, None)
        margin_B = reward_B2.new_zeros(len(reward_B2)) if margin_B is None else margin_B.flatten().to(reward_B2)
        if not margin_B.isfinite().all():
            row = int((~margin_B.isfinite()).nonzero()[0])
            raise DataError(f"RewardLoss: margin must be finite: got {margin_B[row].item()} in row {row}.")
        if self.level == "sequence":
            loss_B = fn.bradley_terry(*reward_B2.unbind(-1), margin_B)
        else:
            loss_B = _token_loss(reward_CT, batch, margin_B, self.first_share)
        chosen_B, rejected_B = reward_B2.detach().unbind(-1)
        return RewardLossOutput(
            loss_reward=mean(loss_B),
            pairs_right=mean((chosen_B > rejected_B).to(loss_B.dtype)),
            margin=mean(chosen_B - rejected_B),
            chosen_reward=mean(chosen_B),
            rejected_reward=mean(rejected_B),
            tokens=pairs.mask_CT.sum().to(loss_B.dtype),
            batch_size=[],
        )

    def _read(self, td: TensorDictBase) -> Pairs:
        pairs = read_pairs(td, self.tensor_keys, "RewardLoss")
        if has_images(pairs.media):
            raise DataError("RewardLoss: a reward network reads text only: the batch has images.")
        return pairs

    def _rewards(self, batch: PaddedBatch) -> Tensor:
        return self.reward_network(batch.input_ids, batch.attention_mask)


def _last(reward_CT: Tensor, batch: PaddedBatch) -> Tensor:
    """[B, 2]: the rewards after the last tokens."""
    last_C = batch.attention_mask.sum(-1) - 1
    return torch.stack(reward_CT.gather(1, last_C.unsqueeze(-1)).squeeze(-1).chunk(2), -1)


def _token_loss(reward_CT: Tensor, batch: PaddedBatch, margin_B: Tensor, first_share: float) -> Tensor:
    """[B]: a pair's loss at its first difference, mixed with the mean from there to the end of the longer one."""
    length_C = batch.attention_mask.sum(-1, keepdim=True)
    place_T = torch.arange(reward_CT.shape[1], device=reward_CT.device)
    # The shorter of a pair keeps its last reward, so that the longer one is compared up to its end.
    kept_CT = reward_CT.gather(1, torch.minimum(place_T, length_C - 1))
    chosen_BT, rejected_BT = kept_CT.chunk(2)
    # -1 in the padding: where one conversation ends and the other continues, they differ.
    one_BT, other_BT = batch.input_ids.masked_fill(~batch.attention_mask, -1).chunk(2)
    parted_BT = (one_BT != other_BT).cumsum(-1) > 0
    counted_BT = parted_BT & (place_T < torch.maximum(*length_C.chunk(2)))
    loss_BT = fn.bradley_terry(chosen_BT, rejected_BT, margin_B.unsqueeze(-1)).masked_fill(~counted_BT, 0.0)
    mean_B = loss_BT.sum(-1) / counted_BT.sum(-1).clamp(min=1)
    first_B = loss_BT.gather(1, parted_BT.int().argmax(-1, keepdim=True)).squeeze(-1)
    return (1 - first_share) * mean_B + first_share * first_B
