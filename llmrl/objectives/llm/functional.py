"""Policy-gradient arithmetic: tensors in, tensors out, no keys, no modules, no state.

A loss combines four choices: the ratio and its level, the surrogate, the weight of each token in the sum (aggregation),
and the KL estimate. A fifth corrects for the difference between the engine that sampled and the trainer.
The loss modules read the tensors from a batch; advantages come from MCAdvantage.

Shapes: B sequences, T tokens; ``mask_BT`` is True on the tokens that are trained. ``lp`` is the log-prob under the
current weights (with grad), ``lo`` under the proximal policy, ``lg`` under the engine that sampled, ``lr`` under the
reference. Outside the mask, log-probs may have any value, also NaN: every function here ignores them. Ratios and
advantages must be finite everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from llmrl.errors import ConfigError, DataError, MissingKeyError, did_you_mean
from llmrl.objectives.llm.settings import Aggregation, Correction, KLEstimator

Preference = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo"]

MAX_LOG_RATIO = 20.0  # e**20 = 5e8: a larger ratio carries no information, and e**89 is infinite in float32


# --------------------------------------------------------------------------------------------------------- the ratios


def log_ratio(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log(pi_new / pi_old) per token, 0 outside the mask, clamped to +-20 (no gradient beyond)."""
    return (new_BT - old_BT).masked_fill(~mask_BT, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """GSPO's log-ratio: the mean over the tokens of a sequence, repeated at each of them.

    A mean, unlike a sum, has the same range for all lengths, so one clip range fits all. The loss of a token, and its
    gradient, then depend on every token of the sequence.
    Source: Zheng et al. 2025 (arXiv:2507.18071).
    """
    length_B = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    mean_B1 = log_ratio_BT.masked_fill(~mask_BT, 0.0).sum(-1, keepdim=True) / length_B
    return mean_B1.expand_as(log_ratio_BT).masked_fill(~mask_BT, 0.0)


def sequence_sum(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the trained tokens of each sequence, float[B]."""
    return value_BT.masked_fill(~mask_BT, 0.0).sum(-1)


# ----------------------------------------------------------------------------------------- surrogates, to be minimised


def clipped_surrogate(
    log_ratio_BT: Tensor, advantage_BT: Tensor, *, low: float, high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token.

    ``dual_clip`` c > 1 bounds the loss of a token with a negative advantage by -c A, however large its ratio.
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; ``low != high`` is DAPO's Clip-Higher (arXiv:2503.14476);
    dual clip: Ye et al. 2020 (arXiv:1912.09729).

    >>> ratio = torch.tensor([1.0, 1.5])
    >>> clipped_surrogate(ratio.log(), torch.ones(2), low=0.2, high=0.2)
    tensor([-1.0000, -1.2000])
    """
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    if dual_clip is None:
        return loss_BT
    return torch.where(advantage_BT < 0, torch.minimum(loss_BT, -dual_clip * advantage_BT), loss_BT)


def cispo(log_ratio_BT: Tensor, log_prob_BT: Tensor, advantage_BT: Tensor, *, low: float, high: float) -> Tensor:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A log pi per token: clipping bounds the weight, every token keeps a
    gradient. ``low=1`` leaves only the upper bound.

    Source: MiniMax-M1 (arXiv:2506.13585).
    """
    weight_BT = log_ratio_BT.detach().exp().clamp(1 - low, 1 + high)
    return -weight_BT * advantage_BT * log_prob_BT


def reinforce(log_prob_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """-A log pi per token. Source: Williams 1992."""
    return -advantage_BT * log_prob_BT


def sapo(
    log_ratio_BT: Tensor, advantage_BT: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A per token: a soft gate in place of the clip.

    ``tau_positive`` applies where A > 0, ``tau_negative`` elsewhere. Source: SAPO (arXiv:2511.20347).
    """
    tau_BT = torch.full_like(advantage_BT, tau_negative).masked_fill(advantage_BT > 0, tau_positive)
    return -(4 / tau_BT) * torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1)) * advantage_BT


def dppo(
    log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor, *, low: float, high: float
) -> Tensor:
    """-r A per token with r = pi / mu, mu the engine's policy, without a clip; leaves out tokens whose probability has
    already moved too far in the direction of A (see `dppo_outside`).

    The trust region bounds the change in probability: the ratio of a rare token can be large after a tiny change.
    Source: divergence PPO in its total-variation form (arXiv:2602.04879).
    """
    outside_BT = torch.logical_or(*dppo_outside(log_prob_BT, behaviour_BT, mask_BT, advantage_BT, low=low, high=high))
    ratio_BT = log_ratio(log_prob_BT, behaviour_BT, mask_BT).exp()
    return -(ratio_BT * advantage_BT).masked_fill(outside_BT, 0.0)


@torch.no_grad()
def dppo_outside(
    log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Two masks bool[B, T]: pi - mu < -low where A <= 0, and pi - mu > high where A > 0."""
    moved_BT = (log_prob_BT.exp() - behaviour_BT.exp()).masked_fill(~mask_BT, 0.0)
    return (moved_BT < -low) & (advantage_BT <= 0), (moved_BT > high) & (advantage_BT > 0)


def entropy_threshold(entropy_N: Tensor, quantile: float) -> float:
    """The entropy from which on a token is among the share ``quantile`` of N tokens with the highest; inf for none.

    Source: Wang et al. 2025, "Beyond the 80/20 rule" (arXiv:2506.01939), eq. 6; interpolated as in TRL.

    >>> round(entropy_threshold(torch.tensor([0.1, 0.4, 0.2, 0.3, 0.0]), 0.4), 4)  # 0.3 and 0.4 are above it
    0.24
    """
    # numpy: `torch.quantile` takes at most 2**24 values.
    return float(np.quantile(entropy_N.double().numpy(force=True), 1 - quantile)) if len(entropy_N) else math.inf


def minor_sft(log_prob_B: Tensor, reference_log_prob_B: Tensor, *, beta: float) -> Tensor:
    """-log sigmoid(beta (log pi - log pi_ref)) per sequence: a sample that the model already prefers counts less.

    Source: Xie et al. 2024, Minor SFT (arXiv:2408.10642).
    """
    return -torch.nn.functional.logsigmoid(beta * (log_prob_B - reference_log_prob_B))


# --------------------------------------------------------------------------------------------------------- preferences


def preference(
    margin_B: Tensor, *, kind: Preference, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """The loss of pairs whose implicit rewards, log pi - log pi_ref, differ by ``margin_B``: chosen minus rejected.

    sigmoid   -log sigmoid(beta m); with label_smoothing e, the assumed share of wrong labels:
              -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)
    ipo       (m - 1 / (2 beta))^2
    hinge     max(0, 1 - beta m)
    simpo     -log sigmoid(beta m - gamma), with m the difference of mean log-probs per token, without a reference
    orpo      -beta log sigmoid(m), with m a `log_odds_ratio`

    Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; Chowdhury et al. 2024 (arXiv:2403.00409) for smoothing; Azar
    et al. 2023 (arXiv:2310.12036), eq. 17; Zhao et al. 2023 (arXiv:2305.10425), section 2.3; Meng et al. 2024
    (arXiv:2405.14734), eq. 6; Hong et al. 2024 (arXiv:2403.07691), eq. 7.

    >>> preference(torch.tensor([0.0, 5.0]), kind="ipo", beta=0.1)
    tensor([25.,  0.])
    """
    match kind:
        case "sigmoid":
            log_right_B = torch.nn.functional.logsigmoid(beta * margin_B)
            log_wrong_B = torch.nn.functional.logsigmoid(-beta * margin_B)
            return -(1 - label_smoothing) * log_right_B - label_smoothing * log_wrong_B
        case "ipo":
            return (margin_B - 1 / (2 * beta)) ** 2
        case "hinge":
            return torch.relu(1 - beta * margin_B)
        case "simpo":
            return -torch.nn.functional.logsigmoid(beta * margin_B - gamma)
        case "orpo":
            return -beta * torch.nn.functional.logsigmoid(margin_B)
    raise unknown("preference: kind", kind, get_args(Preference))


def log_odds_ratio(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """log of odds(chosen) / odds(rejected), with odds(p) = p / (1 - p), from mean log-probs per token.

    Source: Hong et al. 2024, ORPO (arXiv:2403.07691), eqs. 4 and 5.

    >>> ratio = log_odds_ratio(torch.tensor([0.8]).log(), torch.tensor([0.5]).log()).exp()
    >>> round(ratio.item(), 4)  # (0.8 / 0.2) / (0.5 / 0.5)
    4.0
    """

    def log_one_minus_exp(log_p_B: Tensor) -> Tensor:
        log_p_B = log_p_B.clamp(max=-torch.finfo(log_p_B.dtype).eps)  # p = 1 has infinite odds
        return torch.log(-torch.expm1(log_p_B))

    return chosen_B - rejected_B - (log_one_minus_exp(chosen_B) - log_one_minus_exp(rejected_B))


def kto(
    log_ratio_B: Tensor,
    desirable_B: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The loss of single answers that are desirable or not, w (1 - sigmoid(s beta (log pi - log pi_ref - kl))): s and w
    are 1 and ``desirable_weight`` for a desirable answer, -1 and ``undesirable_weight`` for another one.

    Source: Ethayarajh et al. 2024, KTO (arXiv:2402.01306), eqs. 7 and 8.

    >>> kto(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), 2.0, beta=0.1, undesirable_weight=3.0)
    tensor([0.5000, 1.5000])
    """
    sign_B = torch.full_like(log_ratio_B, -1.0).masked_fill(desirable_B, 1.0)
    weight_B = torch.full_like(log_ratio_B, undesirable_weight).masked_fill(desirable_B, desirable_weight)
    return weight_B * torch.sigmoid(-sign_B * beta * (log_ratio_B - kl))


def bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | float = 0.0) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin) per pair: the loss of a reward model.

    Source: Touvron et al. 2023, Llama 2 (arXiv:2307.09288), eqs. 1 and 2.
    """
    return -torch.nn.functional.logsigmoid(chosen_B - rejected_B - margin_B)


# ----------------------------------------------------------------------------------------------------------------- KL


def kl_estimate(
    log_prob_BT: Tensor,
    reference_BT: Tensor,
    mask_BT: Tensor,
    kind: KLEstimator = "k3",
    *,
    log_ratio_BT: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(pi || reference) on tokens that pi sampled; 0 outside the mask.

    With d = log ref - log pi:

    | kind | value | as a loss |
    |---|---|---|
    | ``k1`` | -d | unbiased value; its gradient has mean zero: only for a metric or a reward |
    | ``k2`` | d^2 / 2 | unbiased gradient on-policy |
    | ``k3`` | exp(d) - d - 1 | unbiased value, never negative; biased gradient |
    | ``k3+`` | of k3 | the value of k3 with the gradient of k2 |
    | ``k3-weighted`` | r k3 | unbiased in value and gradient; r = exp(``log_ratio_BT``) is differentiated too |

    Source: Schulman, "Approximating KL divergence" (joschu.net, 2020); the gradients are derived from the formulas.
    """
    d_BT = log_ratio(reference_BT, log_prob_BT, mask_BT)
    match kind:
        case "k1":
            return -d_BT
        case "k2":
            return d_BT.square() / 2
        case "k3":
            return d_BT.exp() - d_BT - 1
        case "k3+":
            # k2 - k2.detach() has the value 0 and the gradient of k2.
            k2_BT, fixed_BT = d_BT.square() / 2, d_BT.detach()
            return (fixed_BT.exp() - fixed_BT - 1) + (k2_BT - k2_BT.detach())
        case "k3-weighted":
            if log_ratio_BT is None:
                raise ConfigError("kl_estimate: kind 'k3-weighted' needs log_ratio_BT, got None.")
            return (d_BT.exp() - d_BT - 1) * log_ratio_BT.exp()
    raise unknown("KL estimator", kind, get_args(KLEstimator))


# -------------------------------------------------------------------------------------------------------- distillation


def divergence(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of a student p from a teacher q, and its gradient with respect to the student's logits.

    beta 1    reverse, KL(p || q)
    beta 0    forward, KL(q || p)
    between   Jensen-Shannon: beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p

    Reads    log-probs float[C, V], which are overwritten
    Returns  float[C], float[C, V]
    Source   Agarwal et al. 2024, GKD (arXiv:2306.13649); with g = dD/dp, the gradient is p (g - sum p g)

    >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]])
    >>> [round(divergence(p.log(), q.log(), beta)[0].item(), 4) for beta in (1.0, 0.0, 0.5)]
    [0.2231, 0.1927, 0.0507]
    """
    if beta == 0:
        q_CV = log_q_CV.exp()
        value_C = expectation(q_CV, log_q_CV.sub_(log_p_CV))
        return value_C, log_p_CV.exp_().sub_(q_CV)
    if beta == 1:
        p_CV, gap_CV, share = log_p_CV.exp(), log_p_CV.sub_(log_q_CV), 1.0
        value_C = kl_p_C = expectation(p_CV, gap_CV)
    else:
        share = 1 - beta
        log_m_CV = torch.logaddexp(log_p_CV + math.log(share), log_q_CV + math.log(beta))
        kl_q_C = expectation(log_q_CV.exp(), log_q_CV.sub_(log_m_CV))
        p_CV, gap_CV = log_p_CV.exp(), log_p_CV.sub_(log_m_CV)
        kl_p_C = expectation(p_CV, gap_CV)
        value_C = beta * kl_q_C + share * kl_p_C
    return value_C, gap_CV.sub_(kl_p_C[:, None]).mul_(p_CV).mul_(share)


def expectation(p_CV: Tensor, value_CV: Tensor) -> Tensor:
    """sum p x, float[C]."""
    return torch.bmm(p_CV[:, None], value_CV[:, :, None]).view(-1)  # without a third [C, V] tensor


def sampled_divergence(log_prob_BT: Tensor, teacher_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """KL(p || q) at each position, estimated from the one token that was sampled there.

    The value is lp - lq, whose mean over samples is the KL. Its own gradient has mean zero; the one here is
    (lp - lq) grad lp, whose mean is the gradient of the KL. Tokens that older weights sampled are weighted by
    exp(lp - lg), at most 2.
    """
    gap_BT = log_ratio(log_prob_BT, teacher_BT, mask_BT).detach()
    weight_BT = log_ratio(log_prob_BT, behaviour_BT, mask_BT).detach().exp().clamp(max=2.0)
    gradient_BT = gap_BT * log_prob_BT.masked_fill(~mask_BT, 0.0)
    return weight_BT * (gap_BT + gradient_BT - gradient_BT.detach())


# -------------------------------------------------------------------------------------- mismatch of engine and trainer


def correction_weight(
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    kind: Correction,
    *,
    cap: float = 2.0,
    band: tuple[float, float] = (0.5, 2.0),
) -> Tensor:
    """Importance weight per token, for the mismatch between engine and trainer; detached, 1 for "none".

    With rho = exp(lo - lg) per token, and P its product and M its geometric mean over the sequence:

    | kind | weight |
    |---|---|
    | ``tis`` | min(rho, cap) |
    | ``mask`` | rho inside ``band``, else 0 (IcePop) |
    | ``seq-tis`` | min(P, cap) |
    | ``seq-mask`` | P if P <= cap, else 0 |
    | ``geo-mask`` | min(rho, cap) in sequences with M inside ``band``, else 0 |

    A token of weight 0 still counts in the denominators, so the loss shrinks as more tokens are dropped.
    `sequence_veto` can be combined with every kind.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (tis);
    Ling-Team 2025, arXiv:2510.18855 (mask); Liu et al. 2025, "When speed kills stability" (sequence level).
    """
    log_rho_BT = log_ratio(proximal_BT.detach(), behaviour_BT.detach(), mask_BT)
    rho_BT = log_rho_BT.exp()
    low, high = band
    match kind:
        case "none":
            return torch.ones_like(rho_BT)
        case "tis":
            return rho_BT.clamp(max=cap)
        case "mask":
            return rho_BT.where((rho_BT >= low) & (rho_BT <= high), 0.0)
        case "seq-tis" | "seq-mask":
            # Clamped before exp: the product over a long sequence easily overflows float32.
            product_B1 = log_rho_BT.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            kept_B1 = product_B1.clamp(max=cap) if kind == "seq-tis" else product_B1.where(product_B1 <= cap, 0.0)
            return kept_B1.expand_as(rho_BT)
        case "geo-mask":
            mean_BT = sequence_log_ratio(log_rho_BT, mask_BT).exp()
            return rho_BT.clamp(max=cap).where((mean_BT >= low) & (mean_BT <= high), 0.0)
    raise unknown("correction", kind, get_args(Correction))


def sequence_veto(proximal_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> Tensor:
    """bool[B, T], True for all tokens of a sequence if any has rho = exp(lo - lg) outside [low, high].

    A token that is nearly impossible for the trainer shows that the sequence was not sampled from its policy.
    Source: Liu et al. 2025, "When speed kills stability".
    """
    rho_BT = log_ratio(proximal_BT.detach(), behaviour_BT.detach(), mask_BT).exp()
    broken_BT = ((rho_BT < low) | (rho_BT > high)) & mask_BT
    return broken_BT.any(-1, keepdim=True).expand_as(mask_BT)


# -------------------------------------------------------------------------------------------------------- aggregation


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of a whole optimizer step, over all micro-batches and ranks: the denominators of a loss.

    ``tokens`` trained tokens, ``sequences`` rows with at least one of them, ``groups`` groups with at least one,
    ``group_tokens`` trained tokens by group id (only "prompt-mean" reads it), ``log_ratios`` the sum of log pi - log
    pi_ref of mismatched answers (only `KTOLoss` reads it). Counts of disjoint parts add up:

    >>> StepCounts(tokens=5, sequences=2, groups=1, group_tokens={7: 5}) + StepCounts(3, 1, 1, {7: 3})
    StepCounts(tokens=8, sequences=3, groups=1, group_tokens={7: 8}, log_ratios=0.0)

    Every term is a local sum divided by a count of the step, so the terms of micro-batches add up to that of the step.
    Under DDP or FSDP, which average gradients, multiply the loss by the number of ranks.
    """

    tokens: int = 0
    sequences: int = 0
    groups: int = 0
    group_tokens: dict[int, int] = field(default_factory=dict)
    log_ratios: float = 0.0

    def __add__(self, other: StepCounts) -> StepCounts:
        merged = dict(self.group_tokens)
        for group, tokens in other.group_tokens.items():
            merged[group] = merged.get(group, 0) + tokens
        # A group in both parts counts once; only its id shows that it is the same group.
        groups = len(merged) if merged else self.groups + other.groups
        log_ratios = self.log_ratios + other.log_ratios
        return StepCounts(self.tokens + other.tokens, self.sequences + other.sequences, groups, merged, log_ratios)

    def __radd__(self, other: int) -> StepCounts:
        if other != 0:
            return NotImplemented
        return self  # so that sum(counts) works

    def over_ranks(self) -> StepCounts:
        """The sum over all processes of the default process group; itself if there is none."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        gathered: list[StepCounts] = [self] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, self)
        return sum(gathered)

    @classmethod
    def of(cls, mask_BT: Tensor, group_id_B: Tensor | None = None) -> StepCounts:
        """Counts of one batch: mask bool[B, T], group ids int64[B] or None (then no group is counted)."""
        length_B = mask_BT.sum(-1)
        lengths = length_B.tolist()
        group_tokens: dict[int, int] = {}
        if group_id_B is not None:
            for group, tokens in zip(group_id_B.reshape(-1).tolist(), lengths, strict=True):
                if tokens:
                    group_tokens[group] = group_tokens.get(group, 0) + tokens
        return cls(sum(lengths), sum(tokens > 0 for tokens in lengths), len(group_tokens), group_tokens)


def token_weights(
    mask_BT: Tensor,
    aggregation: Aggregation,
    counts: StepCounts,
    *,
    max_length: int | None = None,
    group_id_B: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token in the loss: loss = sum(weights * per-token loss). Zero outside the mask.

    With N tokens, B sequences and n_i tokens in sequence i, counted over the whole step:

    | aggregation | weight of a token |
    |---|---|
    | ``token`` | 1 / N |
    | ``seq-mean`` | 1 / (B n_i) |
    | ``seq-sum`` | 1 / B |
    | ``dr_grpo`` | 1 / (B max_length) |
    | ``prompt-mean`` | 1 / (groups * tokens of the group) |
    | ``sum`` | 1 |

    Raises  DataError if the step has no trained token, ConfigError if dr_grpo has no ``max_length``,
            MissingKeyError if prompt-mean has no group ids
    """
    if counts.tokens < 1 or counts.sequences < 1:
        raise DataError(
            "aggregation: the step must hold at least one trained token: got "
            f"{counts.tokens} tokens in {counts.sequences} sequences; look at the assistant mask of the batch."
        )
    mask_BT = mask_BT.to(dtype)
    match aggregation:
        case "token":
            return mask_BT / counts.tokens
        case "seq-mean":
            return mask_BT / (mask_BT.sum(-1, keepdim=True).clamp(min=1) * counts.sequences)
        case "seq-sum":
            return mask_BT / counts.sequences
        case "dr_grpo":
            if max_length is None:
                raise ConfigError("aggregation: 'dr_grpo' divides by a constant length: max_length must be given.")
            # A constant divisor: 1 / n_i would make each token of a long wrong answer count less.
            return mask_BT / (counts.sequences * max_length)
        case "prompt-mean":
            if group_id_B is None or not counts.group_tokens:
                raise MissingKeyError("aggregation: 'prompt-mean' needs the 'group_id' of every row, int64[B].")
            # The rows of a group may be spread over micro-batches and ranks: divide by its tokens in the whole step.
            per_row = [counts.group_tokens.get(group, 1) for group in group_id_B.reshape(-1).tolist()]
            return mask_BT / (torch.tensor(per_row, dtype=dtype, device=mask_BT.device)[:, None] * counts.groups)
        case "sum":
            return mask_BT
    raise unknown("aggregation", aggregation, get_args(Aggregation))


def expert_balance(chosen_RE: Tensor, probs_RE: Tensor, tokens: Tensor) -> Tensor:
    """The load-balancing loss E sum_e f_e P_e of E experts: K if each token goes to K experts and all get equal load.

    chosen_RE  tokens sent to each expert by each of R routers; f_e is the mean over routers and tokens
    probs_RE   router probabilities summed over the tokens, with grad; P_e is their mean in the same way
    tokens     the number of tokens in these sums
    Source     Switch Transformer, equations 4 to 6, over all layers at once as in transformers

    >>> float(expert_balance(torch.tensor([[2.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor(4.0)))
    1.0
    """
    rows = tokens * len(chosen_RE)
    return chosen_RE.shape[-1] * ((chosen_RE.sum(0) / rows) * (probs_RE.sum(0) / rows)).sum()


def unknown(what: str, name: object, known: tuple[str, ...]) -> ConfigError:
    """The error for a name that is not one of ``known``."""
    hint = did_you_mean(name, known) if isinstance(name, str) else ""
    return ConfigError(f"{what}: expected one of {', '.join(map(repr, known))}, got {name!r}.{hint}")
