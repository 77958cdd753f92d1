"""Direct preference optimisation: raises the log-prob of a chosen answer over that of a rejected one.

A row of the batch is a pair: the ids of the chosen conversation, then those of the rejected one, so that micro-batches
and ranks never split a pair.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, get_args

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.functional import Preference, StepCounts
from llmrl.objectives.llm.pairs import Pairs, read_pairs
from llmrl.objectives.metric import Metric


@shows_values
class DPOLossOutput(TensorClass["nocast"]):
    """``loss_dpo``, to differentiate, and metrics: means over the pairs of the step; ``tokens`` is a count."""

    loss_dpo: Tensor
    pairs_right: Tensor | None = None  # share of pairs whose chosen answer has the larger implicit reward
    margin: Tensor | None = None  # beta (chosen minus rejected implicit reward)
    chosen_log_prob: Tensor | None = None  # of the whole answer; per token if the loss takes means
    rejected_log_prob: Tensor | None = None
    tokens: Tensor | None = None  # trained tokens of this batch


class DPOLoss(LossModule):
    """The preference loss over pairs of answers to one prompt.

    Reads   ("tokens", "full")               int64 ragged[T]  chosen conversation, then rejected one
            "num_chosen"                     int64[B]         number of tokens of the chosen one
            ("masks", "all_assistant_mask")  bool ragged[T]   the answers' tokens, their ends of turn included
            "reference_log_probs"            float32[B, 2]    `sequence_log_probs` of both answers under the
                                                              reference; not if ``reference_free``
            "media"                          image tensors    if there are any; both conversations share them, with
                                                              "positions" in the ids of both
    Calls   actor_network.token_scores(ids, attention mask, select, entropy=), with media= if the batch has "media"
    Returns DPOLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  DataError for a pair with one answer that has no trained token; MissingKeyError; ConfigError for settings
            that contradict each other

    kind                     "sigmoid" (DPO), "ipo", "hinge" (SLiC), "simpo" or "orpo": `functional.preference`. "orpo"
                             adds -log p of the chosen answer, its mean over the tokens
    beta                     how strongly the policy is held to the reference: a larger beta keeps it nearer; of "orpo"
                             the weight of its preference term. None: 0.1, for "simpo" 2
    label_smoothing          assumed share of wrongly labelled pairs; only for "sigmoid"
    gamma                    only for "simpo": by how much beta times the margin should exceed 0. None: 1
    normalize_by_seq_length  log-probs are means over an answer's tokens, not sums; None: True for all but "sigmoid" and
                             "hinge" (their papers). "simpo" and "orpo" have no other form
    reference_free           the reference is uniform: its log-probs are 0; always with "simpo" and "orpo"
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "assistant_mask": reading.ASSISTANT_MASK,
        "num_chosen": "num_chosen",
        "reference": "reference_log_probs",
    }
    metrics: ClassVar = {
        "pairs_right": Metric("preference/right_frac"),
        "margin": Metric("preference/margin"),
        "chosen_log_prob": Metric("preference/chosen_logp"),
        "rejected_log_prob": Metric("preference/rejected_logp"),
    }

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        kind: Preference = "sigmoid",
        beta: float | None = None,
        label_smoothing: float = 0.0,
        gamma: float | None = None,
        normalize_by_seq_length: bool | None = None,
        reference_free: bool = False,
    ) -> None:
        super().__init__()
        if kind not in get_args(Preference):
            raise fn.unknown("DPOLoss: kind", kind, get_args(Preference))
        own_form = kind in ("simpo", "orpo")
        beta = beta if beta is not None else 2.0 if kind == "simpo" else 0.1
        if not beta > 0:
            raise ConfigError(f"DPOLoss: beta must be above 0: got {beta}.")
        if not 0 <= label_smoothing < 0.5:
            raise ConfigError(f"DPOLoss: label_smoothing must be within [0, 0.5): got {label_smoothing}.")
        if label_smoothing and kind != "sigmoid":
            raise ConfigError(f"DPOLoss: label_smoothing is for kind='sigmoid': got kind={kind!r}.")
        if gamma is not None and kind != "simpo":
            raise ConfigError(f"DPOLoss: gamma is for kind='simpo': got kind={kind!r}.")
        if own_form and normalize_by_seq_length is False:
            raise ConfigError(f"DPOLoss: kind={kind!r} compares means over tokens: got normalize_by_seq_length=False.")
        self.actor_network = actor_network
        self.kind, self.beta, self.label_smoothing = kind, beta, label_smoothing
        self.gamma = 1.0 if gamma is None else gamma
        self.normalize_by_seq_length = normalize_by_seq_length
        if normalize_by_seq_length is None:
            self.normalize_by_seq_length = own_form or kind == "ipo"
        self.reference_free = reference_free or own_form

    def placeholder(self, device: torch.device) -> dict[str, Tensor]:
        one = torch.ones(1, dtype=torch.int64, device=device)
        return {"num_chosen": one, "reference_log_probs": torch.zeros(1, 2, device=device)}

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts tokens and pairs (as ``sequences``) in the whole batch of an optimizer step, on this rank."""
        return read_pairs(td, self.tensor_keys, "DPOLoss").counts()

    @torch.no_grad()
    def sequence_log_probs(self, td: TensorDictBase) -> Tensor:
        """float32[B, 2]: the log-probs of the chosen and the rejected answers, as the loss compares them."""
        return self._score(read_pairs(td, self.tensor_keys, "DPOLoss"))

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> DPOLossOutput:
        pairs = read_pairs(td, self.tensor_keys, "DPOLoss")
        mean = partial(pairs.mean, counts=normalizer or pairs.counts())
        log_prob_B2 = self._score(pairs)
        reference_B2 = torch.zeros_like(log_prob_B2)
        if not self.reference_free:
            reference_B2 = pairs.reference(td, self.tensor_keys.reference).to(log_prob_B2)
        # An answer's implicit reward is beta times its log-ratio, up to a prompt term that cancels in the margin.
        chosen_B, rejected_B = (log_prob_B2 - reference_B2).unbind(-1)
        margin_B = fn.log_odds_ratio(chosen_B, rejected_B) if self.kind == "orpo" else chosen_B - rejected_B
        given = {"beta": self.beta, "label_smoothing": self.label_smoothing, "gamma": self.gamma}
        loss_B = fn.preference(margin_B, kind=self.kind, **given)
        if self.kind == "orpo":  # it also learns the chosen answers, so no reference has to hold it
            loss_B = loss_B - chosen_B
        return DPOLossOutput(
            loss_dpo=mean(loss_B),
            pairs_right=mean((margin_B.detach() > 0).to(loss_B.dtype)),
            margin=mean(self.beta * margin_B.detach()),
            chosen_log_prob=mean(log_prob_B2[:, 0].detach()),
            rejected_log_prob=mean(log_prob_B2[:, 1].detach()),
            tokens=pairs.mask_CT.sum().to(loss_B.dtype),
            batch_size=[],
        )

    def _score(self, pairs: Pairs) -> Tensor:
        """float32[B, 2], with grad."""
        log_prob_C = pairs.log_probs(self.actor_network)
        if self.normalize_by_seq_length:
            log_prob_C = log_prob_C / pairs.mask_CT.sum(-1).clamp(min=1)
        return torch.stack(log_prob_C.chunk(2), -1)  # the chosen answers are the first half of the rows
