"""Settings of `GRPOLoss`, checked together and described in words, and published algorithms by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from llmrl.errors import ConfigError
from llmrl.objectives.llm.batch import MaskingStrategy
from llmrl.objectives.llm.functional import Aggregation, Correction, KLEstimator, unknown

Proximal = Literal["behaviour", "detach", "recomputed"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo", "reinforce"]

_CHOICES = {
    "aggregation": (*get_args(Aggregation), "none"),
    "masking_strategy": get_args(MaskingStrategy),
    "ratio_level": get_args(RatioLevel),
    "surrogate": get_args(Surrogate),
    "kl_estimator": get_args(KLEstimator),
    "proximal": get_args(Proximal),
    "correction": (None, *get_args(Correction)),
}
_DOCUMENTED_NAMES = {  # settings whose keyword in GRPOLoss has another name
    "clip": "clip_epsilon",
    "entropy": "entropy_coeff",
    "kl": "kl_to_ref_coeff",
    "kl_inference": "kl_to_inference_coeff",
}
_DOCUMENTED_AGGREGATIONS = {"token_mean": "token", "prompt_mean": "seq-mean"}
_CAPPED = ("tis", "seq-tis", "seq-mask", "geo-mask")
_BANDS = {"mask": (0.5, 2.0), "geo-mask": (0.99, 1.01)}  # defaults for rho and for its geometric mean

_AGGREGATION_WORDS = {
    "token": "sum over tokens / tokens of the step",
    "seq-mean": "mean over sequences of token means",
    "seq-sum": "mean over sequences of token sums",
    "dr_grpo": "sum over tokens / (sequences x max length)",
    "prompt-mean": "mean over groups of token means",
    "sum": "sum over tokens",
    "none": "none, one value per token",
}
_CORRECTION_WORDS = {
    "tis": "rho <= {cap:g} (token)",
    "mask": "rho outside [{low:g}, {high:g}] dropped (token)",
    "seq-tis": "rho <= {cap:g} (sequence product)",
    "seq-mask": "rho > {cap:g} dropped (sequence product)",
    "geo-mask": "sequences with mean rho outside [{low:g}, {high:g}] dropped, rho <= {cap:g} (token)",
}
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


@dataclass(frozen=True, kw_only=True)
class GRPOSettings:
    """Ratio, surrogate, aggregation and KL of the loss, under the names of a recipe's ``grpo:`` section.

    Raises  ConfigError for a value that is out of range, or for settings that contradict each other
    """

    clip: float | tuple[float, float] = 0.2  # one number for both sides; kept as (low, high)
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] | None = None
    proximal: Proximal = "behaviour"
    correction: Correction | None = None  # None: "none" with proximal="behaviour", else "tis"
    correction_cap: float | None = None
    correction_band: tuple[float, float] | None = None
    correction_veto: tuple[float, float] | None = None
    kl_mask_threshold: float | None = None
    aggregation: str = "token"
    max_length: int | None = None
    kl: float | None = None
    kl_inference: float | None = None
    kl_estimator: KLEstimator = "k3"
    entropy: float = 0.0
    entropy_bonus: bool = True
    masking_strategy: MaskingStrategy = "sft"

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Settings from keyword arguments of `GRPOLoss`."""
        names = {documented: name for name, documented in _DOCUMENTED_NAMES.items()}
        settings = {names.get(keyword, keyword): value for keyword, value in keywords.items()}
        if (aggregation := settings.get("aggregation")) in _DOCUMENTED_AGGREGATIONS:
            settings["aggregation"] = _DOCUMENTED_AGGREGATIONS[aggregation]
        return cls(**settings)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `GRPOLoss`."""
        return {_DOCUMENTED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", _clip_bounds(self.clip))
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(f"GRPOLoss: {name}", getattr(self, name), tuple(filter(None, known)))
        for holds, problem in self._checks():
            if not holds:
                raise ConfigError(f"GRPOLoss: {problem}.")

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """The rules of the settings, each with the error message for its violation."""
        yield self.dual_clip is None or self.dual_clip > 1, f"dual_clip must be above 1: got {self.dual_clip}"
        threshold, kls = self.kl_mask_threshold, (self.kl, self.kl_inference)
        yield threshold is None or threshold > 0, f"kl_mask_threshold must be above 0: got {threshold}"
        yield (
            all(coefficient is None or coefficient >= 0 for coefficient in kls),
            f"kl_to_ref_coeff and kl_to_inference_coeff must not be negative: got {kls[0]} and {kls[1]}",
        )
        surrogate, proximal, correction = self.surrogate, self.proximal, self.engine_correction["kind"]
        cap, band, veto = self.correction_cap, self.correction_band, self.correction_veto
        yield (
            self.dual_clip is None or surrogate == "clip",
            f"dual_clip is not supported with surrogate={surrogate!r}; use surrogate='clip'",
        )
        yield (
            self.ratio_level == "token" or surrogate not in ("reinforce", "dppo"),
            f"ratio_level='sequence' is not supported with surrogate={surrogate!r}",
        )
        yield (
            surrogate != "dppo" or proximal == "behaviour",
            f"surrogate='dppo' compares with the engine and needs proximal='behaviour': got {proximal!r}",
        )
        yield (
            self.sapo_tau is None or (surrogate == "sapo" and min(self.sapo_tau) > 0),
            f"sapo_tau must be above 0 and needs surrogate='sapo': got {self.sapo_tau} with {surrogate!r}",
        )
        yield (
            self.max_length is None or (self.aggregation == "dr_grpo" and self.max_length > 0),
            "max_length must be above 0 and needs aggregation='dr_grpo': got "
            f"max_length={self.max_length} with aggregation={self.aggregation!r}",
        )
        yield (
            correction == "none" or proximal != "behaviour",
            f"correction={correction!r} is not supported with proximal='behaviour', which leaves nothing to correct; "
            "use proximal='detach' or 'recomputed'",
        )
        yield (
            cap is None or (correction in _CAPPED and cap > 0),
            f"correction_cap must be above 0 and needs correction to be one of {', '.join(_CAPPED)}: got {cap} with "
            f"correction={correction!r}",
        )
        yield (
            band is None or (correction in _BANDS and 0 <= band[0] < band[1]),
            f"correction_band must be (low, high) and needs correction to be one of {', '.join(_BANDS)}: got {band} "
            f"with correction={correction!r}",
        )
        yield (
            veto is None or (proximal != "behaviour" and 0 <= veto[0] < 1 < veto[1]),
            "correction_veto must be (below 1, above 1) and needs proximal='detach' or 'recomputed': got "
            f"{veto} with proximal={proximal!r}",
        )
        yield (
            self.entropy_bonus or not self.entropy,
            f"entropy_coeff needs entropy_bonus=True: got entropy_coeff={self.entropy}",
        )

    @property
    def engine_correction(self) -> dict[str, Any]:
        """Keyword arguments of `correction_weight`, with the defaults filled in."""
        kind = self.correction or ("none" if self.proximal == "behaviour" else "tis")
        band = self.correction_band or _BANDS.get(kind, (0.5, 2.0))
        return {"kind": kind, "cap": self.correction_cap or 2.0, "band": band}

    @property
    def taus(self) -> tuple[float, float]:
        """SAPO's tau where A > 0, and elsewhere."""
        return self.sapo_tau or (1.0, 1.05)

    def describe(self) -> dict[str, str]:
        """Ratio, aggregation and KL in words."""
        low, high = self.clip
        match self.surrogate:
            case "reinforce":
                ratio = "none (REINFORCE)"
            case "cispo":
                ratio = f"{self.ratio_level}, weight held in [{1 - low:g}, {1 + high:g}] (CISPO)"
            case "sapo":
                positive, other = self.taus
                ratio = f"{self.ratio_level}, soft gate of width 1/{positive:g} (A > 0) or 1/{other:g} (SAPO)"
            case "dppo":
                ratio = f"token, left out once the probability moved by -{low:g} (A <= 0) or {high:g} (A > 0) (DPPO)"
            case _:
                ratio = f"{self.ratio_level}, clip [{1 - low:g}, {1 + high:g}]"
        if self.dual_clip is not None:
            ratio += f", dual clip {self.dual_clip:g}"
        correction = self.engine_correction
        if correction["kind"] != "none":
            band_low, band_high = correction["band"]
            words = _CORRECTION_WORDS[correction["kind"]]
            ratio += f"; engine correction: {words.format(cap=correction['cap'], low=band_low, high=band_high)}"
        if self.correction_veto is not None:
            veto_low, veto_high = self.correction_veto
            ratio += f"; sequences with a rho outside [{veto_low:g}, {veto_high:g}] dropped"
        kls = [
            f"{coefficient:g} x {self.kl_estimator} to the {other}"
            for coefficient, other in ((self.kl, "reference"), (self.kl_inference, "engine"))
            if coefficient
        ]
        return {"ratio": ratio, "aggregation": _AGGREGATION_WORDS[self.aggregation], "kl": " + ".join(kls) or "0"}


def _clip_bounds(clip: Any) -> tuple[float, float]:
    pair = clip if isinstance(clip, Sequence) else (clip, clip)
    numbers = len(pair) == 2 and all(isinstance(bound, int | float) for bound in pair)
    if not (numbers and 0 <= pair[0] <= 1 and pair[1] >= 0):
        raise ConfigError(
            f"GRPOLoss: clip_epsilon must be a number or (low, high), with low in [0, 1] and high >= 0: got {clip!r}."
        )
    return float(pair[0]), float(pair[1])


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
        defaults = GRPOSettings().keywords()
        return {name: value for name, value in self.settings.keywords().items() if value != defaults[name]}

    def describe(
        self, advantage: Mapping[str, Any] | None = None, loss: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """The four choices in words, with the given keyword arguments in place of the preset's."""
        chosen = {**self.advantage, **(advantage or {})}
        words = _ADVANTAGE_WORDS[chosen.get("scale", "group")]
        if chosen.get("whiten"):
            words += ", whitened over the tokens of the batch"
        if chosen.get("on_zero_variance") == "drop":
            words += "; groups with equal rewards are dropped"
        return {"advantage": words, **GRPOSettings.from_keywords(**{**self.loss, **(loss or {})}).describe()}


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
        {"surrogate": "dppo", "proximal": "behaviour", "correction": None, "kl_inference": 2e-3, "kl_estimator": "k2"},
    ),
}
# With one update per batch of rollouts the current policy is the proximal one; "detach" saves a forward pass.
_SHARED = {"proximal": "detach", "correction": "tis"}
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        name: Preset(name, source, MappingProxyType(advantage), GRPOSettings(**{**_SHARED, **settings}))
        for name, (source, advantage, settings) in _PRESETS.items()
    }
)
