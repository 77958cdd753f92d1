"""What `GRPOLoss` returns: terms to differentiate, and metrics that add up over the micro-batches of a step."""

from __future__ import annotations

import torch
from tensordict import TensorClass
from torch import Tensor

__all__ = ["GRPOLossOutput", "step_metrics"]


class GRPOLossOutput(TensorClass["nocast"]):
    """Terms to be summed and differentiated (``loss_*``), and detached metrics; all float32 scalars.

    Terms are weighted by the loss's aggregation, metrics are means over the trained tokens, both over the counts of the
    step: those of micro-batches add up (`merge_outputs`; maxima excepted). ``tokens`` and the two ``weight_*`` sums
    are plain sums. None where it was not asked for.
    """

    loss_objective: Tensor
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    tokens: Tensor | None = None  # trained tokens of this batch
    clip_fraction: Tensor | None = None  # tokens that the surrogate holds back, dual clip included
    clip_fraction_low: Tensor | None = None
    clip_fraction_high: Tensor | None = None
    kl_approx: Tensor | None = None  # KL(engine || current), k3 on the sampled tokens
    ESS: Tensor | None = None  # effective sample size of exp(lp - lg), as a fraction of the tokens
    entropy: Tensor | None = None
    kl_to_ref: Tensor | None = None
    kl_to_inference: Tensor | None = None
    ratio_mean: Tensor | None = None  # of the ratio that the surrogate sees
    ratio_max: Tensor | None = None
    correction_mean: Tensor | None = None  # weight of the engine correction
    correction_max: Tensor | None = None
    masked_fraction: Tensor | None = None  # tokens with weight 0: by the correction, its veto or kl_mask_threshold
    mismatch_mean: Tensor | None = None  # |log-prob of the trainer - log-prob of the engine|
    mismatch_max: Tensor | None = None
    weight_sum: Tensor | None = None  # sum of exp(lp - lg)
    weight_square_sum: Tensor | None = None

    @staticmethod
    def derived(merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is computed from the sums of a step instead of being summed."""
        return {"ESS": _effective_fraction(merged["weight_sum"], merged["weight_square_sum"], merged["tokens"])}


@torch.no_grad()
def step_metrics(
    measured: dict[str, Tensor],
    mask_BT: Tensor,
    num_tokens: int,
    *,
    log_ratio_BT: Tensor,
    clipped: tuple[Tensor, Tensor],
    weight_BT: Tensor,
    drift_BT: Tensor,
    mismatch_BT: Tensor,
) -> dict[str, Tensor]:
    """The metrics of one micro-batch of a step with ``num_tokens`` trained tokens.

    ``measured`` is averaged under its names. ``clipped`` is where the surrogate holds back from below and from above,
    ``drift_BT`` lp - lg, ``mismatch_BT`` what the trainer said before the update less what the engine said.
    """

    def mean(value_BT: Tensor) -> Tensor:
        return value_BT.masked_fill(~mask_BT, 0).sum() / num_tokens

    def largest(value_BT: Tensor) -> Tensor:  # of what is not negative
        return value_BT.masked_fill(~mask_BT, 0.0).amax()

    ratio_BT, importance_BT = log_ratio_BT.exp(), drift_BT.exp().masked_fill(~mask_BT, 0.0)
    low, high = (mean(clipped_BT.to(ratio_BT)) for clipped_BT in clipped)
    tokens = mask_BT.sum().to(ratio_BT)
    weight_sum, weight_square_sum = importance_BT.sum(), importance_BT.square().sum()
    return {
        **{name: mean(value_BT) for name, value_BT in measured.items()},
        "tokens": tokens,
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "kl_approx": mean(drift_BT.exp() - 1 - drift_BT),
        "ESS": _effective_fraction(weight_sum, weight_square_sum, tokens),
        "ratio_mean": mean(ratio_BT),
        "ratio_max": largest(ratio_BT),
        "correction_mean": mean(weight_BT),
        "correction_max": largest(weight_BT),
        "masked_fraction": mean((weight_BT == 0).to(ratio_BT)),
        "mismatch_mean": mean(mismatch_BT.abs()),
        "mismatch_max": largest(mismatch_BT.abs()),
        "weight_sum": weight_sum,
        "weight_square_sum": weight_square_sum,
    }


def _effective_fraction(weight_sum: Tensor, weight_square_sum: Tensor, tokens: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), in (0, 1]; 0 for no tokens."""
    return weight_sum.square() / (tokens * weight_square_sum).clamp(min=torch.finfo(weight_sum.dtype).tiny)
