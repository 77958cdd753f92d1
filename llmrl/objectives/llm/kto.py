"""Kahneman-Tversky optimisation: learns from single answers, each of which is desirable or not.

A desirable answer should be likelier than under the reference by more than a reference point, an undesirable one by
less. The reference point is the KL of the policy from the reference, estimated on answers to other prompts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.data.ragged.tensordicts import required
from llmrl.errors import ConfigError
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.pairs import Pairs, read_pairs
from llmrl.objectives.metric import Metric

_ROUNDING = 1e-3  # nats of a whole answer: before the first update all differences are rounding errors, not right


@shows_values
class KTOLossOutput(TensorClass["nocast"]):
    """``loss_kto``, to differentiate, and metrics: means over the answers of the step; ``tokens`` is a count.

    The sums over the desirable or undesirable answers are divided by the number of all answers of the step;
    `KTOLoss.derived` makes means of them.
    """

    loss_kto: Tensor
    pairs_right: Tensor | None = None  # share of answers whose log-ratio is on the right side of the reference point
    kl: Tensor | None = None  # the reference point; a part of it for each answer
    desirable: Tensor | None = None  # share of desirable answers
    desirable_reward_sum: Tensor | None = None  # beta (log pi - log pi_ref)
    undesirable_reward_sum: Tensor | None = None
    desirable_log_prob_sum: Tensor | None = None
    undesirable_log_prob_sum: Tensor | None = None
    tokens: Tensor | None = None  # trained tokens of this batch


class KTOLoss(LossModule):
    """The loss of desirable and undesirable answers; a row has one, and the same prompt with the answer of another row.

    Reads   ("tokens", "full")               int64 ragged[T]  the conversation, then the mismatched one
            "num_chosen"                     int64[B]         number of tokens of the first
            ("masks", "all_assistant_mask")  bool ragged[T]   the answers' tokens, their ends of turn included
            "desirable"                      bool[B]
            "reference_log_probs"            float32[B, 2]    `sequence_log_probs` of both answers under the reference
            "media"                          image tensors    if there are any, as `DPOLoss`
    Calls   actor_network.token_scores(ids, attention mask, select, entropy=), with media= if the batch has "media"
    Returns KTOLossOutput; pass ``normalizer``, the StepCounts of the optimizer step with the sum of
            `mismatched_log_ratios` over all its rows as ``log_ratios``, and micro-batches add up
    Raises  DataError for a row with one answer that has no trained token; MissingKeyError; ConfigError

    beta                                  how strongly the policy is held to the reference
    desirable_weight, undesirable_weight  of the two kinds of answers, to balance unequal numbers of them
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "assistant_mask": reading.ASSISTANT_MASK,
        "num_chosen": "num_chosen",
        "desirable": "desirable",
        "reference": "reference_log_probs",
    }
    metrics: ClassVar = {
        "pairs_right": Metric("preference/right_frac"),
        "margin": Metric("preference/margin"),
        "kl": Metric("preference/kl"),
        "desirable_log_prob": Metric("preference/chosen_logp"),
        "undesirable_log_prob": Metric("preference/rejected_logp"),
    }
    reads_mismatched = True
    work = 2 / 3  # the answer forward and backward, which costs three forward passes, and the mismatched one forward
    reference_free = False

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        for name, value in {"beta": beta, **self.weights}.items():
            if not value > 0:
                raise ConfigError(f"KTOLoss: {name} must be above 0: got {value}.")
        self.actor_network, self.beta = actor_network, beta

    def placeholder(self, device: torch.device) -> dict[str, Tensor]:
        one = torch.ones(1, dtype=torch.int64, device=device)
        return {"num_chosen": one, "desirable": one.bool(), "reference_log_probs": torch.zeros(1, 2, device=device)}

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts tokens and answers (as ``sequences``) in the whole batch of an optimizer step, on this rank."""
        return StepCounts.of(self._read(td).half(0).mask_CT)

    @torch.no_grad()
    def sequence_log_probs(self, td: TensorDictBase) -> Tensor:
        """float32[B, 2]: the log-probs of the answer and of the mismatched one."""
        pairs = self._read(td)  # each half alone, as the loss scores them: the same rounding
        return torch.stack([pairs.half(number).log_probs(self.actor_network) for number in (0, 1)], -1)

    @torch.no_grad()
    def mismatched_log_ratios(self, td: TensorDictBase) -> Tensor:
        """float32[B]: log pi - log pi_ref of the mismatched answers, 0 for a row without trained tokens."""
        pairs = self._read(td)
        mismatched = pairs.half(1)
        log_prob_B = mismatched.log_probs(self.actor_network)
        ratio_B = log_prob_B - pairs.reference(td, self.tensor_keys.reference)[:, 1].to(log_prob_B)
        return ratio_B.masked_fill(~mismatched.mask_CT.any(-1), 0.0)

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> KTOLossOutput:
        pairs = self._read(td)
        answers = pairs.half(0)
        counts = normalizer
        if counts is None:
            counts = replace(StepCounts.of(answers.mask_CT), log_ratios=float(self.mismatched_log_ratios(td).sum()))
        mean = partial(pairs.mean, counts=counts)
        kl = max(counts.log_ratios / max(counts.sequences, 1), 0.0)  # of the whole step; without gradient
        desirable_B = required(td, self.tensor_keys.desirable, "KTOLoss").bool().to(answers.mask_CT.device)
        log_prob_B = answers.log_probs(self.actor_network)
        log_ratio_B = log_prob_B - pairs.reference(td, self.tensor_keys.reference)[:, 0].to(log_prob_B)
        loss_B = fn.kto(log_ratio_B, desirable_B, kl, beta=self.beta, **self.weights)
        reward_B, log_prob_B = self.beta * log_ratio_B.detach(), log_prob_B.detach()
        ahead_B = (log_ratio_B.detach() - kl).abs() > _ROUNDING
        is_right_B = ahead_B & ((log_ratio_B.detach() > kl) == desirable_B)
        return KTOLossOutput(
            loss_kto=mean(loss_B),
            pairs_right=mean(is_right_B.to(loss_B.dtype)),
            kl=mean(torch.full_like(reward_B, kl)),
            desirable=mean(desirable_B.to(loss_B.dtype)),
            desirable_reward_sum=mean(reward_B.masked_fill(~desirable_B, 0.0)),
            undesirable_reward_sum=mean(reward_B.masked_fill(desirable_B, 0.0)),
            desirable_log_prob_sum=mean(log_prob_B.masked_fill(~desirable_B, 0.0)),
            undesirable_log_prob_sum=mean(log_prob_B.masked_fill(desirable_B, 0.0)),
            tokens=answers.mask_CT.sum().to(loss_B.dtype),
            batch_size=[],
        )

    def derived(self, merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the answers of each kind that the step has, and the margin of rewards if it has both."""
        shares = {"desirable": merged["desirable"], "undesirable": 1 - merged["desirable"]}
        found = {
            f"{kind}_{what}": merged[f"{kind}_{what}_sum"] / share
            for kind, share in shares.items()
            for what in ("reward", "log_prob")
            if share > 1e-6  # shares that are summed are rounded
        }
        if len(found) == 4:
            found["margin"] = found["desirable_reward"] - found["undesirable_reward"]
        return found

    def _read(self, td: TensorDictBase) -> Pairs:
        return read_pairs(td, self.tensor_keys, "KTOLoss")
