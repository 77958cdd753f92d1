"""The settings of GRPO and its relatives, checked together and described in words.

One class is a recipe's ``grpo:`` section, what `GRPOLoss` takes, and what a plan prints. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from llmrl.errors import ConfigError, did_you_mean
from llmrl.objectives.llm.teacher_settings import NamedTeacher
from llmrl.settings import Settings

Aggregation = Literal["token", "seq-mean", "seq-sum", "dr_grpo", "prompt-mean", "sum"]
Correction = Literal["none", "tis", "mask", "seq-tis", "seq-mask", "geo-mask"]
KLEstimator = Literal["k1", "k2", "k3", "k3+", "k3-weighted"]
MaskingStrategy = Literal["sft", "rlhf", "generic"]
Proximal = Literal["behaviour", "detach", "recomputed"]
RatioLevel = Literal["token", "sequence"]
Scale = Literal["group", "population", "clamp", "none", "loo", "loo_std", "batch", "max_rl", "raw"]
RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo", "reinforce"]

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


def _both_sides(clip: Any) -> Any:
    pair = clip if isinstance(clip, Sequence) else (clip, clip)
    numbers = len(pair) == 2 and all(isinstance(bound, int | float) for bound in pair)
    if clip is not None and not (numbers and 0 <= pair[0] <= 1 and pair[1] >= 0):
        raise ValueError(f"must be a number or (low, high), with low in [0, 1] and high >= 0: got {clip!r}")
    return None if clip is None else pair


def _own_name(aggregation: Any) -> Any:
    return _DOCUMENTED_AGGREGATIONS.get(aggregation, aggregation) if isinstance(aggregation, str) else aggregation


class GRPOSettings(Settings):
    """Advantage, ratio, surrogate, aggregation and KL: a recipe's ``grpo:`` section, and the settings of `GRPOLoss`.

    None leaves a setting open: to the algorithm that ``algo`` names, then to the default of `GRPOLoss`.
    """

    clip: Annotated[tuple[float, float] | None, BeforeValidator(_both_sides)] = Field(
        default=None, description="how far below and above 1 the ratio may go; one number for both"
    )
    scale: Scale | None = Field(
        default=None, description="what divides the centred reward; for the advantage, not the loss"
    )
    multi_objective_aggregation: RewardAggregation | None = Field(
        default=None,
        description="of several rewards the weighted sum is normalised in the group (null), or each alone, and their "
        "sum over the step (GDPO); for the advantage, not the loss",
    )
    ratio_level: RatioLevel | None = Field(default=None, description="a ratio per token, or one per answer (GSPO)")
    surrogate: Surrogate | None = Field(default=None, description="the objective that the ratio enters")
    aggregation: Annotated[Literal[*get_args(Aggregation), "none"] | None, BeforeValidator(_own_name)] = Field(
        default=None, description="how token losses are averaged", json_schema_extra={"also": ["loss"]}
    )
    max_length: int | None = Field(
        default=None, gt=0, description="the divisor of aggregation dr_grpo; null in a recipe: sampling.max_tokens"
    )
    kl: float | None = Field(
        default=None,
        ge=0,
        description="weight of the KL divergence from the starting model, the reference",
        json_schema_extra={"also": ["beta", "kl_coef", "kl_coeff"]},  # names in other libraries
    )
    kl_inference: float | None = Field(
        default=None, ge=0, description="weight of the KL divergence from the engine that sampled"
    )
    kl_estimator: KLEstimator | None = Field(
        default=None, description="estimator of a KL divergence from sampled tokens"
    )
    entropy: float | None = Field(default=None, description="weight of the entropy bonus")
    observation: float | None = Field(
        default=None,
        gt=0,
        description="weight of -log p of the observations: all tokens after the first answer that the policy did not "
        "sample, such as tool results (world modelling); null: they are not trained",
    )
    top_entropy_quantile: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="the surrogate trains only this share of an update's tokens, those of the highest entropy, such as "
        "0.2; null: all",
    )
    entropy_bonus: bool | None = Field(default=None, description="false: entropy is not even measured")
    proximal: Proximal | None = Field(
        default=None,
        description="denominator of the ratio: the engine's log-probs, the current ones, or those that the trainer "
        "computes before its first update; null: behaviour with max_staleness above 1, else detach with one update per "
        "step, else whichever loses no accuracy",
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="bound on the loss of a token with a negative advantage"
    )
    sapo_tau: tuple[float, float] | None = Field(
        default=None, description="temperatures of surrogate sapo where A > 0, and elsewhere; null: 1 and 1.05"
    )
    correction: Correction | None = Field(
        default=None, description="importance weight for the difference between engine and trainer"
    )
    correction_cap: float | None = Field(default=None, gt=0, description="upper bound of that weight; null: 2")
    correction_band: tuple[float, float] | None = Field(
        default=None, description="the weights that mask and geo-mask keep"
    )
    correction_veto: tuple[float, float] | None = Field(
        default=None, description="sequences with a token weight outside this range are left out, such as [1e-4, 100]"
    )
    kl_mask_threshold: float | None = Field(
        default=None,
        gt=0,
        description="tokens whose policy moved further from the engine, (lp - lg)^2 / 2, are left out",
    )
    masking_strategy: MaskingStrategy | None = Field(default=None, description="which tokens are trained, see GRPOLoss")
    teacher: NamedTeacher = Field(
        default=None, description="a model whose divergence from the policy joins the loss: its name, or a section"
    )

    @model_validator(mode="before")
    @classmethod
    def _rename_loss(cls, section: Any) -> Any:
        """Accepts ``loss``, the former name of ``aggregation``, in files of older runs."""
        if isinstance(section, dict) and "loss" in section and "aggregation" not in section:
            section = {"aggregation" if name == "loss" else name: value for name, value in section.items()}
        return section

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Settings from the keyword arguments of `GRPOLoss`.

        Raises  TypeError for an unknown one, ConfigError for a value that is out of range
        """
        names = {_DOCUMENTED_NAMES.get(name, name): name for name in cls.model_fields}
        for keyword in keywords.keys() - names.keys() - _DOCUMENTED_NAMES.keys():
            raise TypeError(f"GRPOLoss: unknown argument {keyword!r}.{did_you_mean(keyword, names)}")
        try:
            return cls(**{names.get(keyword, keyword): value for keyword, value in keywords.items()})
        except ValidationError as error:
            raise ConfigError(f"GRPOLoss: {_first_fault(error)}") from None

    def keywords(self) -> dict[str, Any]:
        """The settings that are given, as keyword arguments of `GRPOLoss`."""
        return {_DOCUMENTED_NAMES.get(name, name): value for name, value in self.model_dump(exclude_none=True).items()}

    def over(self, *others: GRPOSettings) -> Self:
        """These settings; what they leave open is taken from the first of ``others`` that gives it."""
        given: dict[str, Any] = {}
        for settings in (self, *others):
            given = settings.model_dump(exclude_none=True) | given
        return type(self)(**given)

    def complete(self) -> Self:
        """These settings with the defaults of `GRPOLoss`.

        Raises  ConfigError for settings that contradict each other
        """
        settings = self.over(DEFAULTS)
        for holds, problem in settings._checks():
            if not holds:
                raise ConfigError(f"GRPOLoss: {problem}.")
        return settings

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """The rules of complete settings, each with the error message for its violation."""
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
            self.max_length is None or self.aggregation == "dr_grpo",
            "max_length needs aggregation='dr_grpo': got "
            f"max_length={self.max_length} with aggregation={self.aggregation!r}",
        )
        yield (
            correction == "none" or proximal != "behaviour",
            f"correction={correction!r} is not supported with proximal='behaviour', which leaves nothing to correct; "
            "use proximal='detach' or 'recomputed'",
        )
        yield (
            cap is None or correction in _CAPPED,
            f"correction_cap needs correction to be one of {', '.join(_CAPPED)}: got {cap} with "
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
        if self.top_entropy_quantile is not None:
            ratio += f"; only the {self.top_entropy_quantile:.0%} of an update's tokens with the highest entropy"
        if self.correction_veto is not None:
            veto_low, veto_high = self.correction_veto
            ratio += f"; sequences with a rho outside [{veto_low:g}, {veto_high:g}] dropped"
        kls = [
            f"{coefficient:g} x {self.kl_estimator} to the {other}"
            for coefficient, other in ((self.kl, "reference"), (self.kl_inference, "engine"))
            if coefficient
        ]
        if self.teacher is not None:
            kls.append(f"{self.teacher.weight:g} x {self.teacher.in_words()}")
        if self.observation is not None:
            ratio += f"; and {self.observation:g} x -log p of the observations"
        return {"ratio": ratio, "aggregation": _AGGREGATION_WORDS[self.aggregation], "kl": " + ".join(kls) or "0"}


def _first_fault(error: ValidationError) -> str:
    """The first fault of keyword arguments, under their documented name."""
    fault = error.errors()[0]
    name, given = str(fault["loc"][0]), fault["input"]
    keyword = _DOCUMENTED_NAMES.get(name, name)
    if fault["type"] == "literal_error":
        known = [part.strip(" '") for part in fault["ctx"]["expected"].replace(" or ", ",").split(",")]
        near = did_you_mean(given, known) if isinstance(given, str) else ""
        return f"{keyword}: expected one of {', '.join(map(repr, known))}, got {given!r}.{near}"
    reason = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{keyword} {reason}" + ("." if "got" in reason else f": got {given!r}.")


DEFAULTS = GRPOSettings(
    clip=(0.2, 0.2),
    ratio_level="token",
    surrogate="clip",
    proximal="behaviour",
    aggregation="token",
    kl_estimator="k3",
    entropy=0.0,
    entropy_bonus=True,
    masking_strategy="sft",
)


class RejectionSettings(Settings):
    """Which of a prompt's answers are learned."""

    keep: int = Field(
        2, ge=1, description="at most so many answers to a prompt, the best above their median, are learned"
    )
