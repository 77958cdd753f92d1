"""Published algorithms by name, as settings of advantage and loss. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmrl.objectives.llm.settings import GRPOSettings

_ADVANTAGE_WORDS = {
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


@dataclass(frozen=True, slots=True)
class Preset:
    """One published algorithm: keyword arguments of `MCAdvantage`, settings of `GRPOLoss`, and the source.

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
    settings: GRPOSettings

    @property
    def loss(self) -> dict[str, Any]:
        """Keyword arguments of `GRPOLoss` that differ from its defaults."""
        return self.settings.keywords()

    def describe(
        self, advantage: Mapping[str, Any] | None = None, settings: GRPOSettings | None = None
    ) -> dict[str, str]:
        """The four choices in words, with the given arguments and settings in place of the preset's."""
        chosen = {**self.advantage, **(advantage or {})}
        words = _ADVANTAGE_WORDS[chosen.get("scale", "group")]
        if chosen.get("reward_weights"):
            words = f"of each reward alone {words}; their weighted sum, minus its mean, / its std over the step (GDPO)"
        if chosen.get("whiten"):
            words += ", whitened over the tokens of the batch"
        if chosen.get("on_zero_variance") == "drop":
            spread = chosen.get("min_spread")
            which = f"whose rewards differ by at most {spread:g}" if spread else "with equal rewards"
            words += f"; groups {which} are dropped"
        return {"advantage": words, **(settings or GRPOSettings()).over(self.settings).complete().describe()}


# name: source, keyword arguments of `MCAdvantage`, settings of `GRPOLoss` besides the shared ones
_PRESETS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "grpo": (
        "DeepSeekMath, arXiv:2402.03300, with DAPO's token mean and clip, and without its KL term",
        {"scale": "group"},
        {"clip": (0.2, 0.28)},
    ),
    "dr_grpo": (
        "Dr. GRPO, arXiv:2503.20783; max_length has to be given",
        {"scale": "none"},
        {"aggregation": "dr_grpo"},
    ),
    "dapo": ("DAPO, arXiv:2503.14476", {"scale": "group", "on_zero_variance": "drop"}, {"clip": (0.2, 0.28)}),
    "gspo": (
        "GSPO, arXiv:2507.18071",
        {"scale": "group"},
        {"clip": (3e-4, 4e-4), "ratio_level": "sequence", "aggregation": "seq-mean"},
    ),
    "cispo": (
        "MiniMax-M1, arXiv:2506.13585, with the upper bound of ScaleRL, arXiv:2510.13786",
        {"scale": "group"},
        {"clip": (1.0, 4.0), "surrogate": "cispo"},
    ),
    "rloo": (
        "Ahmadian et al. 2024, arXiv:2402.14740, without its KL in the reward",
        {"scale": "loo"},
        {"surrogate": "reinforce"},
    ),
    "reinforce": (
        "Williams 1992, with the mean reward of the group as baseline",
        {"scale": "none"},
        {"surrogate": "reinforce"},
    ),
    "reinforce++": (
        "REINFORCE++, arXiv:2501.03262, with its KL term left to the loss",
        {"scale": "raw", "whiten": True},
        {},
    ),
    "reinforce++-baseline": (
        "REINFORCE++-baseline, arXiv:2501.03262, with its KL term left to the loss",
        {"scale": "none", "whiten": True},
        {},
    ),
    "sapo": ("SAPO, arXiv:2511.20347", {"scale": "group"}, {"surrogate": "sapo", "aggregation": "seq-mean"}),
    "max_rl": (
        "MaxRL, arXiv:2602.02710; rewards must not be negative",
        {"scale": "max_rl"},
        {"clip": (0.2, 0.28)},
    ),
    "dppo": (
        "DPPO in its binary total-variation form, arXiv:2602.04879, with prime-rl's weight on (log r)^2",
        {"scale": "none"},
        {"surrogate": "dppo", "proximal": "behaviour", "kl_inference": 2e-3, "kl_estimator": "k2"},
    ),
}
# With one update per batch of rollouts the current policy is the proximal one; "detach" saves a forward pass.
_SHARED = {"proximal": "detach"}
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        name: Preset(name, source, MappingProxyType(advantage), GRPOSettings(**{**_SHARED, **settings}))
        for name, (source, advantage, settings) in _PRESETS.items()
    }
)
