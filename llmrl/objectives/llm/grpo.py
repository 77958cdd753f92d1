"""GRPO and its relatives: one loss whose settings are the ratio, the surrogate, the aggregation and the KL estimate.

The arithmetic is in `functional`, reading and padding in `batch`, named settings in `presets`, the metrics in
`grpo_output`, which settings go together in `grpo_checks`. Advantages are in the batch already (`MCAdvantage`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import MaskingStrategy, PaddedBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.grpo_checks import (
    DOCUMENTED_AGGREGATIONS,
    Proximal,
    RatioLevel,
    Surrogate,
    check_settings,
    clip_bounds,
)
from llmrl.objectives.llm.grpo_output import GRPOLossOutput, step_metrics
from llmrl.objectives.llm.presets import DEFAULT_BANDS, DEFAULT_TAU, describe_loss

__all__ = ["GRPOLoss", "GRPOLossOutput"]


class GRPOLoss(LossModule):
    """Policy-gradient loss over the tokens that the policy sampled; computes no advantage.

    Reads   ("tokens", "full")                int64 ragged[T]    or dense [B, T] with ("masks", "all_attention_mask")
            ("masks", "all_assistant_mask")   bool ragged[T]     the tokens to train, see ``masking_strategy``
            ("masks", "trained_from")         int64[B]           only from here on, where the batch has it
            ("log_probs", "full")             float32 ragged[T]  behaviour: of the engine that sampled; instead of it
            ("log_probs", "plain")            float32 ragged[T]  where the batch has it: sampling was cut to some tokens
                                                                 (top-p, top-k, min-p), this is before the cut
            ("proximal_log_probs", "full")    float32 ragged[T]  if proximal="recomputed"
            ("next", "ref_log_probs", "full") float32 ragged[T]  if kl_to_ref_coeff is given
            "advantage"                       float32[B, 1, 1], or [T, 1] per row
            "group_id"                        int64[B]           if aggregation="prompt-mean"
    Calls   actor_network.token_scores(ids, attention mask, select, entropy=) where it has that, else actor_network(td)
            for ("log_probs", "full")
    Returns GRPOLossOutput; with ``normalizer``, the StepCounts of the optimizer step, micro-batches add up
    Raises  MissingKeyError, ShapeError for a column that does not fit the tokens, DataError for NaN on a trained token
            or a step without any; ConfigError for settings that contradict each other
    Source  see `presets` for the algorithms, `functional` for each formula

    ``masking_strategy``: "sft" (without an assistant mask: the response) and "rlhf" train what the policy sampled,
    "generic" also other tokens that have a behaviour log-prob. Rows of the collector say themselves which part is
    theirs, so that with any of the three each sampled token is trained once. The first token of a row has no log-prob,
    and is left out.

    The ratio is exp(lp - lo). ``proximal`` says what lo is: ``behaviour``, the engine's log-probs; ``detach``, lp
    itself (one update per batch: ratio 1, the clip never acts, the gradient is the policy gradient); ``recomputed``,
    what the trainer computed before its first update on the batch. With the last two, ``correction`` weights each token
    for the difference between trainer and engine ("tis" by default), and ``correction_veto=(low, high)`` drops the
    sequences in which any token's exp(lo - lg) is outside, (1e-4, 100) say.

    ``surrogate``: "clip" (PPO), "cispo", "sapo" (with ``sapo_tau``, for positive and for other advantages), "dppo"
    (``clip_epsilon`` bounds how far a token's probability may move from the engine's), "reinforce".

    ``aggregation`` takes "token", "seq-mean", "seq-sum", "dr_grpo", "prompt-mean", "sum" and "none" (per token, not
    normalised), and the names "token_mean" (= "token") and "prompt_mean" (= "seq-mean": per sample, then batch).

    >>> from tensordict import TensorDict, lazy_stack
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from llmrl.modules.llm.log_probs import TokenScorer
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=2))
    >>> def conversation(length, advantage):
    ...     return TensorDict(
    ...         tokens=TensorDict(full=torch.arange(length)),
    ...         masks=TensorDict(all_assistant_mask=torch.arange(length) >= 2),
    ...         log_probs=TensorDict(full=torch.full((length,), -3.4)),
    ...         advantage=torch.full((1, 1), advantage),
    ...     )
    >>> loss = GRPOLoss(TokenScorer(model), clip_epsilon=(0.2, 0.28))
    >>> output = loss(lazy_stack([conversation(5, 1.0), conversation(7, -1.0)]))
    >>> output.loss_objective.backward()
    >>> int(output.tokens)
    8
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "response": reading.RESPONSE,
        "attention_mask": reading.ATTENTION_MASK,
        "assistant_mask": reading.ASSISTANT_MASK,
        "sample_log_prob": ("log_probs", "full"),
        "proximal_log_prob": ("proximal_log_probs", "full"),
        "ref_log_prob": ("next", "ref_log_probs", "full"),
        "advantage": "advantage",
        "group_id": reading.GROUP_ID,
    }

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str = "token",
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.0,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: MaskingStrategy = "sft",
        ratio_level: RatioLevel = "token",
        surrogate: Surrogate = "clip",
        dual_clip: float | None = None,
        kl_estimator: fn.KLEstimator = "k3",
        proximal: Proximal = "behaviour",
        correction: fn.Correction | None = None,
        correction_cap: float | None = None,
        correction_band: tuple[float, float] | None = None,
        correction_veto: tuple[float, float] | None = None,
        sapo_tau: tuple[float, float] | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.clip_low, self.clip_high = clip_bounds(clip_epsilon)
        self.dual_clip, self.kl_mask_threshold = dual_clip, kl_mask_threshold
        self.aggregation = DOCUMENTED_AGGREGATIONS.get(aggregation, aggregation)
        self.max_length = max_length
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_estimator = kl_estimator
        self.device = None if device is None else torch.device(device)
        self.masking_strategy = masking_strategy
        self.ratio_level, self.surrogate, self.proximal = ratio_level, surrogate, proximal
        self.correction = correction or ("none" if proximal == "behaviour" else "tis")
        self.correction_cap, self.correction_band = correction_cap, correction_band
        self.correction_veto = correction_veto
        self.sapo_tau = sapo_tau
        check_settings(self)
        self.correction_cap = correction_cap or 2.0
        self.correction_band = correction_band or DEFAULT_BANDS.get(self.correction, (0.5, 2.0))
        self.sapo_tau = sapo_tau or DEFAULT_TAU

    def describe(self) -> dict[str, str]:
        """Ratio, aggregation and KL in words, for the plan that a run prints."""
        return describe_loss({**vars(self), "clip_epsilon": (self.clip_low, self.clip_high)})

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """What this loss trains on in the whole batch of an optimizer step, on this rank."""
        return StepCounts.of(self._read_mask(td)[1], reading.group_ids(td, self.tensor_keys.group_id))

    @torch.no_grad()
    def proximal_log_probs(self, td: TensorDictBase) -> Tensor:
        """float[B, T], rows padded as in a ragged batch: what ``proximal="recomputed"`` compares with.

        For the very micro-batches of the step, before its first update: in low precision the log-probs of a row depend
        on the batch that it is computed in.
        """
        batch, mask_BT = self._read_mask(td)
        scores = reading.actor_scores(
            self.actor_network, td, batch, mask_BT, log_probs_key=self.tensor_keys.sample_log_prob, entropy=False
        )
        return scores.log_probs

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> GRPOLossOutput:
        keys = self.tensor_keys
        batch, mask_BT = self._read_mask(td)
        group_id_B = reading.group_ids(td, keys.group_id)
        counts = normalizer or StepCounts.of(mask_BT, group_id_B)

        behaviour_key = _untruncated(td, keys.sample_log_prob)
        behaviour_BT = batch.column(td, behaviour_key, "Couldn't find the log-prob of the sampled tokens")
        advantage_BT = batch.advantage(td, keys.advantage)
        scores = reading.actor_scores(
            self.actor_network, td, batch, mask_BT, log_probs_key=keys.sample_log_prob, entropy=self.entropy_bonus
        )
        log_prob_BT = scores.log_probs
        behaviour_BT, advantage_BT = behaviour_BT.to(log_prob_BT), advantage_BT.to(log_prob_BT)
        reading.check_finite(behaviour_BT, mask_BT, str(behaviour_key), "the engine gave none", "GRPOLoss")
        reading.check_finite(advantage_BT, mask_BT, repr(keys.advantage), "its reward failed: drop the row", "GRPOLoss")
        advantage_BT = advantage_BT.masked_fill(~mask_BT, 0.0)

        # 1. the ratio
        if self.proximal == "behaviour":
            proximal_BT = behaviour_BT
        elif self.proximal == "detach":
            proximal_BT = log_prob_BT.detach()
        else:
            missing = "Couldn't find the log-prob of the proximal policy"
            proximal_BT = batch.column(td, keys.proximal_log_prob, missing).to(log_prob_BT)
            reading.check_finite(proximal_BT, mask_BT, str(keys.proximal_log_prob), "compute it again", "GRPOLoss")
        log_ratio_BT = token_log_ratio_BT = fn.log_ratio(log_prob_BT, proximal_BT, mask_BT)
        if self.ratio_level == "sequence":
            log_ratio_BT = fn.sequence_log_ratio(token_log_ratio_BT, mask_BT)

        # 2. the surrogate, and what the difference between engine and trainer makes of it
        loss_BT = self._surrogate(log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT)
        weight_BT = fn.correction_weight(
            proximal_BT, behaviour_BT, mask_BT, self.correction, cap=self.correction_cap, band=self.correction_band
        )
        if self.correction_veto is not None:
            low, high = self.correction_veto
            weight_BT = weight_BT.masked_fill(
                fn.sequence_veto(proximal_BT, behaviour_BT, mask_BT, low=low, high=high), 0.0
            )
        drift_BT = fn.log_ratio(log_prob_BT, behaviour_BT, mask_BT)
        if self.kl_mask_threshold is not None:
            weight_BT = weight_BT.masked_fill(0.5 * drift_BT.detach().square() > self.kl_mask_threshold, 0.0)

        # 3. the sum
        aggregate_BT = fn.token_weights(
            mask_BT,
            "sum" if self.aggregation == "none" else self.aggregation,
            counts,
            max_length=self.max_length,
            group_id_B=group_id_B,
            dtype=log_prob_BT.dtype,
        )

        def aggregate(value_BT: Tensor) -> Tensor:
            value_BT = value_BT.masked_fill(~mask_BT, 0.0) * aggregate_BT
            return value_BT if self.aggregation == "none" else value_BT.sum()

        # 4. the other terms, in the same sum
        terms = {"loss_objective": aggregate(loss_BT * weight_BT)}
        measured = {}
        if scores.entropy is not None:
            measured["entropy"] = scores.entropy.detach()
        if self.entropy_coeff:
            if scores.entropy is None:
                raise ConfigError(
                    f"GRPOLoss: entropy_coeff={self.entropy_coeff} needs an actor with token_scores, got "
                    f"{type(self.actor_network).__name__}, which gives log-probs only."
                )
            terms["loss_entropy"] = -self.entropy_coeff * aggregate(scores.entropy)
        others = []
        if self.kl_to_ref_coeff is not None:
            reference_BT = batch.column(td, keys.ref_log_prob, "Couldn't find the ref log-prob").to(log_prob_BT)
            reading.check_finite(reference_BT, mask_BT, str(keys.ref_log_prob), "score it again", "GRPOLoss")
            others.append(("ref", self.kl_to_ref_coeff, reference_BT))
        if self.kl_to_inference_coeff is not None:
            others.append(("inference", self.kl_to_inference_coeff, behaviour_BT))
        for name, coefficient, other_BT in others:
            kl_BT = fn.kl_estimate(log_prob_BT, other_BT, mask_BT, self.kl_estimator, log_ratio_BT=token_log_ratio_BT)
            terms[f"loss_kl_to_{name}"] = coefficient * aggregate(kl_BT)
            measured[f"kl_to_{name}"] = kl_BT.detach()

        with torch.no_grad():
            trainer_BT = proximal_BT if self.proximal == "recomputed" else log_prob_BT
            metrics = step_metrics(
                measured,
                mask_BT,
                counts.tokens,
                log_ratio_BT=log_ratio_BT,
                clipped=self._clipped(log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT),
                weight_BT=weight_BT,
                drift_BT=drift_BT,
                mismatch_BT=trainer_BT - behaviour_BT,
            )
        return GRPOLossOutput(**terms, **metrics, batch_size=[])

    def _read_mask(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        keys = self.tensor_keys
        batch = PaddedBatch.read(
            td, reader="GRPOLoss", tokens_key=keys.tokens, attention_key=keys.attention_mask, device=self.device
        )
        mask_BT = batch.trained_mask(
            td,
            self.masking_strategy,
            assistant_key=keys.assistant_mask,
            response_key=keys.response,
            sampled_key=_untruncated(td, keys.sample_log_prob),
        )
        return batch, mask_BT

    def _surrogate(
        self, log_ratio_BT: Tensor, log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor
    ) -> Tensor:
        low, high = self.clip_low, self.clip_high
        match self.surrogate:
            case "clip":
                return fn.clipped_surrogate(log_ratio_BT, advantage_BT, low=low, high=high, dual_clip=self.dual_clip)
            case "cispo":
                return fn.cispo(log_ratio_BT, log_prob_BT, advantage_BT, low=low, high=high)
            case "sapo":
                positive, other = self.sapo_tau
                return fn.sapo(log_ratio_BT, advantage_BT, tau_positive=positive, tau_negative=other)
            case "dppo":
                return fn.dppo(log_prob_BT, behaviour_BT, mask_BT, advantage_BT, low=low, high=high)
            case _:
                return fn.reinforce(log_prob_BT, advantage_BT)

    def _clipped(
        self, log_ratio_BT: Tensor, log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """bool[B, T] twice: where the surrogate holds a token back from below and from above."""
        low, high = self.clip_low, self.clip_high
        below_BT, above_BT = log_ratio_BT.exp() < 1 - low, log_ratio_BT.exp() > 1 + high
        match self.surrogate:
            case "clip":  # it acts only where it takes the smaller of the two
                held_BT = above_BT & (advantage_BT > 0)
                if self.dual_clip is not None:
                    held_BT |= (log_ratio_BT.exp() > self.dual_clip) & (advantage_BT < 0)
                return below_BT & (advantage_BT < 0), held_BT
            case "cispo":
                return below_BT, above_BT
            case "dppo":
                return fn.dppo_outside(log_prob_BT, behaviour_BT, mask_BT, advantage_BT, low=low, high=high)
            case _:
                return torch.zeros_like(mask_BT), torch.zeros_like(mask_BT)


def _untruncated(td: TensorDictBase, key: NestedKey) -> NestedKey:
    """The entry "plain" beside the log-probs "full" of the sampled tokens, where the batch has one, else ``key``.

    A ratio compares two policies; the renormalised rest of a truncated distribution is not one of the trainer's.
    """
    if isinstance(key, tuple) and key[-1] == "full":
        plain = (*key[:-1], "plain")
        if td.get(plain, None, as_list=True) is not None:
            return plain
    return key
