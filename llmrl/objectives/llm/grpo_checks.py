"""Which settings of `GRPOLoss` go together; those that do not are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmrl.errors import ConfigError
from llmrl.objectives.llm.batch import MaskingStrategy
from llmrl.objectives.llm.functional import Aggregation, Correction, KLEstimator, unknown

if TYPE_CHECKING:
    from llmrl.objectives.llm.grpo import GRPOLoss

__all__ = ["DOCUMENTED_AGGREGATIONS", "Proximal", "RatioLevel", "Surrogate", "check_settings", "clip_bounds"]

Proximal = Literal["behaviour", "detach", "recomputed"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo", "reinforce"]

DOCUMENTED_AGGREGATIONS = {"token_mean": "token", "prompt_mean": "seq-mean"}

_CHOICES = {
    "aggregation": (*get_args(Aggregation), "none", *DOCUMENTED_AGGREGATIONS),
    "masking_strategy": get_args(MaskingStrategy),
    "ratio_level": get_args(RatioLevel),
    "surrogate": get_args(Surrogate),
    "kl_estimator": get_args(KLEstimator),
    "proximal": get_args(Proximal),
    "correction": get_args(Correction),
}
_CAPPED = ("tis", "seq-tis", "seq-mask", "geo-mask")
_BANDED = ("mask", "geo-mask")


def clip_bounds(clip_epsilon: Any) -> tuple[float, float]:
    """How far below and above 1 a ratio may go, from one number for both or a pair."""
    pair = clip_epsilon if isinstance(clip_epsilon, Sequence) else (clip_epsilon, clip_epsilon)
    numbers = len(pair) == 2 and all(isinstance(bound, int | float) for bound in pair)
    if not (numbers and 0 <= pair[0] <= 1 and pair[1] >= 0):
        raise ConfigError(
            "GRPOLoss: clip_epsilon must be a number or (low, high), with low in [0, 1] and high >= 0: got "
            f"{clip_epsilon!r}."
        )
    return float(pair[0]), float(pair[1])


def check_settings(loss: GRPOLoss) -> None:
    """Raises ConfigError unless the settings of the loss, as they were given, mean something together."""
    for name, known in _CHOICES.items():
        if getattr(loss, name) not in known:
            raise unknown(f"GRPOLoss: {name}", getattr(loss, name), known)
    surrogate, proximal, correction = loss.surrogate, loss.proximal, loss.correction
    cap, band, veto = loss.correction_cap, loss.correction_band, loss.correction_veto
    for holds, what in (
        (loss.dual_clip is None or loss.dual_clip > 1, f"dual_clip must be above 1: got {loss.dual_clip}"),
        (loss.dual_clip is None or surrogate == "clip", f"dual_clip belongs to surrogate='clip': got {surrogate!r}"),
        (
            loss.ratio_level == "token" or surrogate not in ("reinforce", "dppo"),
            f"ratio_level='sequence' means nothing to surrogate={surrogate!r}, which has no ratio of a sequence",
        ),
        (
            surrogate != "dppo" or proximal == "behaviour",
            f"surrogate='dppo' compares with the engine directly: it needs proximal='behaviour', got {proximal!r}",
        ),
        (
            loss.sapo_tau is None or (surrogate == "sapo" and min(loss.sapo_tau) > 0),
            f"sapo_tau must be above 0 and belongs to surrogate='sapo': got {loss.sapo_tau} with {surrogate!r}",
        ),
        (
            (loss.max_length is not None) == (loss.aggregation == "dr_grpo"),
            "max_length is the divisor of aggregation='dr_grpo', and of that alone: got "
            f"max_length={loss.max_length} with aggregation={loss.aggregation!r}",
        ),
        (
            loss.max_length is None or loss.max_length > 0,
            f"max_length counts tokens and must be above 0: got {loss.max_length}",
        ),
        (
            correction == "none" or proximal != "behaviour",
            f"correction={correction!r} compares the proximal policy with the engine, which proximal='behaviour' "
            "says are one: use proximal='detach' or 'recomputed'",
        ),
        (
            cap is None or (correction in _CAPPED and cap > 0),
            f"correction_cap must be above 0 and belongs to {', '.join(_CAPPED)}: got {cap} with "
            f"correction={correction!r}",
        ),
        (
            band is None or (correction in _BANDED and 0 <= band[0] < band[1]),
            f"correction_band must be (low, high) and belongs to {', '.join(_BANDED)}: got {band} with "
            f"correction={correction!r}",
        ),
        (
            veto is None or (proximal != "behaviour" and 0 <= veto[0] < 1 < veto[1]),
            "correction_veto must be (below 1, above 1) and needs proximal='detach' or 'recomputed': got "
            f"{veto} with proximal={proximal!r}",
        ),
        (
            loss.entropy_bonus or not loss.entropy_coeff,
            f"entropy_coeff needs entropy_bonus=True: got entropy_coeff={loss.entropy_coeff}",
        ),
        (
            loss.kl_mask_threshold is None or loss.kl_mask_threshold > 0,
            f"kl_mask_threshold must be above 0: got {loss.kl_mask_threshold}",
        ),
        (
            all(coeff is None or coeff >= 0 for coeff in (loss.kl_to_ref_coeff, loss.kl_to_inference_coeff)),
            "kl_to_ref_coeff and kl_to_inference_coeff must not be negative: got "
            f"{loss.kl_to_ref_coeff} and {loss.kl_to_inference_coeff}",
        ),
    ):
        if not holds:
            raise ConfigError(f"GRPOLoss: {what}.")
