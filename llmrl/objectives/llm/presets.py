"""Algorithms by name. GRPO and its relatives are settings of four choices: advantage, ratio, aggregation, KL.

A preset holds keyword arguments for `MCAdvantage` and `GRPOLoss`, and says in words what they resolve to. This module
imports nothing, so that a plan can be printed before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["DEFAULT_BANDS", "DEFAULT_TAU", "PRESETS", "Preset", "describe_loss"]

DEFAULT_BANDS = {"mask": (0.5, 2.0), "geo-mask": (0.99, 1.01)}  # of rho, and of its geometric mean
DEFAULT_TAU = (1.0, 1.05)  # SAPO's gate where A > 0, and elsewhere


@dataclass(frozen=True, slots=True)
class Preset:
    """One algorithm: what it passes to ``MCAdvantage`` and to ``GRPOLoss``, and where it comes from.

    >>> for choice, words in PRESETS["dapo"].describe().items():
    ...     print(f"{choice:12}{words}")
    advantage   (R - mean_group) / (std_group + eps), 0 if all equal; groups with equal rewards are dropped
    ratio       token, clip [0.8, 1.28]; engine correction: rho <= 2 (token)
    aggregation sum over tokens / tokens of the step
    kl          0
    """

    name: str
    source: str
    advantage: Mapping[str, Any]
    loss: Mapping[str, Any]

    def describe(
        self, advantage: Mapping[str, Any] | None = None, loss: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """The four choices in words, with the given settings in place of the preset's own."""
        settings = {**self.advantage, **(advantage or {})}
        words = _ADVANTAGES[settings.get("scale", "group")]
        if settings.get("whiten"):
            words += ", whitened over the tokens of the batch"
        if settings.get("on_zero_variance") == "drop":
            words += "; groups with equal rewards are dropped"
        return {"advantage": words, **describe_loss({**self.loss, **(loss or {})})}


_ADVANTAGES = {
    "group": "(R - mean_group) / (std_group + eps), 0 if all equal",
    "batch": "(R - mean_group) / (std_batch + eps)",
    "none": "R - mean_group",
    "loo": "R - mean of the group's others",
    "loo_std": "(R - mean of the group's others) / (std of the others + eps)",
    "population": "(R - mean_group) / (population std_group + eps), 0 if all equal",
    "clamp": "(R - mean_group) / max(std_group, eps)",
    "max_rl": "(R - mean_group) / mean_group",
    "raw": "R",
}
_AGGREGATIONS = {
    "token": "sum over tokens / tokens of the step",
    "seq-mean": "mean over sequences of token means",
    "seq-sum": "mean over sequences of token sums",
    "dr_grpo": "sum over tokens / (sequences x max length)",
    "prompt-mean": "mean over groups of token means",
    "sum": "sum over tokens",
    "none": "none, one value per token",
}
_CORRECTIONS = {
    "tis": "rho <= {cap:g} (token)",
    "mask": "rho outside [{low:g}, {high:g}] dropped (token)",
    "seq-tis": "rho <= {cap:g} (sequence product)",
    "seq-mask": "rho > {cap:g} dropped (sequence product)",
    "geo-mask": "sequences with mean rho outside [{low:g}, {high:g}] dropped, rho <= {cap:g} (token)",
}


def describe_loss(settings: Mapping[str, Any]) -> dict[str, str]:
    """Ratio, aggregation and KL in words, from keyword arguments of ``GRPOLoss``."""
    clip = settings.get("clip_epsilon", 0.2)
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    level, surrogate = settings.get("ratio_level", "token"), settings.get("surrogate", "clip")
    if surrogate == "reinforce":
        ratio = "none (REINFORCE)"
    elif surrogate == "cispo":
        ratio = f"{level}, weight held in [{1 - low:g}, {1 + high:g}] (CISPO)"
    elif surrogate == "sapo":
        positive, other = settings.get("sapo_tau") or DEFAULT_TAU
        ratio = f"{level}, soft gate of width 1/{positive:g} (A > 0) or 1/{other:g} (SAPO)"
    elif surrogate == "dppo":
        ratio = f"token, left out once the probability moved by -{low:g} (A <= 0) or {high:g} (A > 0) (DPPO)"
    else:
        ratio = f"{level}, clip [{1 - low:g}, {1 + high:g}]"
    if settings.get("dual_clip") is not None:
        ratio += f", dual clip {settings['dual_clip']:g}"
    proximal = settings.get("proximal", "behaviour")
    correction = settings.get("correction") or ("none" if proximal == "behaviour" else "tis")
    if correction != "none":
        cap = settings.get("correction_cap")
        band_low, band_high = settings.get("correction_band") or DEFAULT_BANDS.get(correction, (0.5, 2.0))
        words = _CORRECTIONS[correction].format(cap=2.0 if cap is None else cap, low=band_low, high=band_high)
        ratio += f"; engine correction: {words}"
    if settings.get("correction_veto") is not None:
        veto_low, veto_high = settings["correction_veto"]
        ratio += f"; sequences with a rho outside [{veto_low:g}, {veto_high:g}] dropped"
    aggregation = settings.get("aggregation", "token")
    aggregation = {"token_mean": "token", "prompt_mean": "seq-mean"}.get(aggregation, aggregation)
    kls = [
        f"{settings[key]:g} x {settings.get('kl_estimator', 'k3')} to the {other}"
        for key, other in (("kl_to_ref_coeff", "reference"), ("kl_to_inference_coeff", "engine"))
        if settings.get(key)
    ]
    return {"ratio": ratio, "aggregation": _AGGREGATIONS[aggregation], "kl": " + ".join(kls) or "0"}


def _preset(name: str, source: str, advantage: Mapping[str, Any], **loss: Any) -> Preset:
    loss = {"proximal": "detach", "correction": "tis", **loss}
    return Preset(name, source, MappingProxyType(dict(advantage)), MappingProxyType(loss))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset(
                "grpo",
                "DeepSeekMath, arXiv:2402.03300, with DAPO's token mean and clip, and without its KL term",
                {"scale": "group"},
                clip_epsilon=(0.2, 0.28),
                aggregation="token",
            ),
            _preset(
                "dr_grpo",
                "Dr. GRPO, arXiv:2503.20783; max_length has to be given",
                {"scale": "none"},
                clip_epsilon=(0.2, 0.2),
                aggregation="dr_grpo",
            ),
            _preset(
                "dapo",
                "DAPO, arXiv:2503.14476",
                {"scale": "group", "on_zero_variance": "drop"},
                clip_epsilon=(0.2, 0.28),
                aggregation="token",
            ),
            _preset(
                "gspo",
                "GSPO, arXiv:2507.18071",
                {"scale": "group"},
                clip_epsilon=(3e-4, 4e-4),
                ratio_level="sequence",
                aggregation="seq-mean",
            ),
            _preset(
                "cispo",
                "MiniMax-M1, arXiv:2506.13585, with the upper bound of ScaleRL, arXiv:2510.13786",
                {"scale": "group"},
                clip_epsilon=(1.0, 4.0),
                surrogate="cispo",
                aggregation="token",
            ),
            _preset(
                "rloo",
                "Ahmadian et al. 2024, arXiv:2402.14740, without its KL in the reward",
                {"scale": "loo"},
                surrogate="reinforce",
                aggregation="token",
            ),
            _preset(
                "reinforce",
                "Williams 1992, with the mean reward of the group as baseline",
                {"scale": "none"},
                surrogate="reinforce",
                aggregation="token",
            ),
            _preset(
                "reinforce++",
                "REINFORCE++, arXiv:2501.03262, with its KL term left to the loss",
                {"scale": "raw", "whiten": True},
                clip_epsilon=(0.2, 0.2),
                aggregation="token",
            ),
            _preset(
                "reinforce++-baseline",
                "REINFORCE++-baseline, arXiv:2501.03262, with its KL term left to the loss",
                {"scale": "none", "whiten": True},
                clip_epsilon=(0.2, 0.2),
                aggregation="token",
            ),
            _preset(
                "sapo",
                "SAPO, arXiv:2511.20347",
                {"scale": "group"},
                surrogate="sapo",
                aggregation="seq-mean",
            ),
            _preset(
                "max_rl",
                "MaxRL, arXiv:2602.02710; rewards must not be negative",
                {"scale": "max_rl"},
                clip_epsilon=(0.2, 0.28),
                aggregation="token",
            ),
            _preset(
                "dppo",
                "DPPO in its binary total-variation form, arXiv:2602.04879, with prime-rl's weight on (log r)^2",
                {"scale": "none"},
                surrogate="dppo",
                clip_epsilon=(0.2, 0.2),
                proximal="behaviour",
                correction=None,
                kl_to_inference_coeff=2e-3,
                kl_estimator="k2",
                aggregation="token",
            ),
        )
    }
)
