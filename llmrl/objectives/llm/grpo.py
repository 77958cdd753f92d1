"""GRPO and its relatives: one loss whose settings are the ratio, the surrogate, the aggregation and the KL estimate.

The arithmetic is in `functional`, reading and padding in `batch`, named settings in `presets`; advantages are written
into the batch beforehand (`MCAdvantage`).
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import MaskingStrategy, PaddedBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.presets import DEFAULT_BANDS, DEFAULT_TAU, describe_loss

__all__ = ["GRPOLoss", "GRPOLossOutput"]

Proximal = Literal["behaviour", "detach", "recomputed"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo", "reinforce"]

_AGGREGATIONS = (*get_args(fn.Aggregation), "none")
_DOCUMENTED_AGGREGATIONS = {"token_mean": "token", "prompt_mean": "seq-mean"}
_CAPPED = ("tis", "seq-tis", "seq-mask", "geo-mask")
_BANDED = ("mask", "geo-mask")


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
    clip_fraction: Tensor | None = None  # tokens whose ratio is clipped
    clip_fraction_low: Tensor | None = None
    clip_fraction_high: Tensor | None = None
    kl_approx: Tensor | None = None  # KL(engine || current), k3 on the sampled tokens
    ESS: Tensor | None = None  # effective sample size of exp(lp - lg), as a fraction of the tokens
    entropy: Tensor | None = None
    kl_to_ref: Tensor | None = None
    kl_to_inference: Tensor | None = None
    ratio_mean: Tensor | None = None  # of the ratio that the surrogate sees
    ratio_max: Tensor | None = None
    correction_mean: Tensor | None = None  # mean weight of the engine correction
    masked_fraction: Tensor | None = None  # tokens with weight 0: by the correction, its veto or kl_mask_threshold
    mismatch_mean: Tensor | None = None  # |log-prob of the trainer - log-prob of the engine|
    mismatch_max: Tensor | None = None
    weight_sum: Tensor | None = None  # sum of exp(lp - lg)
    weight_square_sum: Tensor | None = None

    @staticmethod
    def derived(merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is computed from the sums of a step instead of being summed."""
        return {"ESS": _effective_fraction(merged["weight_sum"], merged["weight_square_sum"], merged["tokens"])}


class GRPOLoss(LossModule):
    """Policy-gradient loss over the tokens that the policy sampled; computes no advantage.

    Reads   ("tokens", "full")                int64 ragged[T]    or dense [B, T] with ("masks", "all_attention_mask")
            ("masks", "all_assistant_mask")   bool ragged[T]     the tokens to train, see ``masking_strategy``
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
        low, high = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
        aggregation = _DOCUMENTED_AGGREGATIONS.get(aggregation, aggregation)
        if correction is None:
            correction = "none" if proximal == "behaviour" else "tis"
        for what, value, known in (
            ("aggregation", aggregation, (*_AGGREGATIONS, *_DOCUMENTED_AGGREGATIONS)),
            ("masking_strategy", masking_strategy, get_args(MaskingStrategy)),
            ("ratio_level", ratio_level, get_args(RatioLevel)),
            ("surrogate", surrogate, get_args(Surrogate)),
            ("kl_estimator", kl_estimator, get_args(fn.KLEstimator)),
            ("proximal", proximal, get_args(Proximal)),
            ("correction", correction, get_args(fn.Correction)),
        ):
            if value not in known:
                raise fn.unknown(f"GRPOLoss: {what}", value, known)
        for holds, what in (
            (0 <= low <= 1 and high >= 0, f"clip_epsilon must be (low in [0, 1], high >= 0): got ({low}, {high})"),
            (dual_clip is None or dual_clip > 1, f"dual_clip must be above 1: got {dual_clip}"),
            (dual_clip is None or surrogate == "clip", f"dual_clip belongs to surrogate='clip': got {surrogate!r}"),
            (
                ratio_level == "token" or surrogate not in ("reinforce", "dppo"),
                f"ratio_level='sequence' means nothing to surrogate={surrogate!r}, which has no ratio of a sequence",
            ),
            (
                surrogate != "dppo" or proximal == "behaviour",
                f"surrogate='dppo' compares with the engine directly: it needs proximal='behaviour', got {proximal!r}",
            ),
            (
                sapo_tau is None or (surrogate == "sapo" and min(sapo_tau) > 0),
                f"sapo_tau must be above 0 and belongs to surrogate='sapo': got {sapo_tau} with {surrogate!r}",
            ),
            (
                (max_length is not None) == (aggregation == "dr_grpo"),
                f"max_length is the divisor of aggregation='dr_grpo', and of that alone: got max_length={max_length} "
                f"with aggregation={aggregation!r}",
            ),
            (max_length is None or max_length > 0, f"max_length counts tokens and must be above 0: got {max_length}"),
            (
                correction == "none" or proximal != "behaviour",
                f"correction={correction!r} compares the proximal policy with the engine, which proximal='behaviour' "
                "says are one: use proximal='detach' or 'recomputed'",
            ),
            (
                correction_cap is None or (correction in _CAPPED and correction_cap > 0),
                f"correction_cap must be above 0 and belongs to {', '.join(_CAPPED)}: got {correction_cap} with "
                f"correction={correction!r}",
            ),
            (
                correction_band is None or (correction in _BANDED and 0 <= correction_band[0] < correction_band[1]),
                f"correction_band must be (low, high) and belongs to {', '.join(_BANDED)}: got {correction_band} with "
                f"correction={correction!r}",
            ),
            (
                correction_veto is None
                or (proximal != "behaviour" and 0 <= correction_veto[0] < 1 < correction_veto[1]),
                "correction_veto must be (below 1, above 1) and needs proximal='detach' or 'recomputed': got "
                f"{correction_veto} with proximal={proximal!r}",
            ),
            (
                entropy_bonus or not entropy_coeff,
                f"entropy_coeff needs entropy_bonus=True: got entropy_coeff={entropy_coeff}",
            ),
            (
                kl_mask_threshold is None or kl_mask_threshold > 0,
                f"kl_mask_threshold must be above 0: got {kl_mask_threshold}",
            ),
        ):
            if not holds:
                raise ConfigError(f"GRPOLoss: {what}.")
        self.actor_network = actor_network
        self.clip_low, self.clip_high, self.dual_clip = float(low), float(high), dual_clip
        self.kl_mask_threshold = kl_mask_threshold
        self.aggregation, self.max_length = aggregation, max_length
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_estimator = kl_estimator
        self.device = None if device is None else torch.device(device)
        self.masking_strategy = masking_strategy
        self.ratio_level, self.surrogate, self.proximal = ratio_level, surrogate, proximal
        self.correction = correction
        self.correction_cap = 2.0 if correction_cap is None else correction_cap
        self.correction_band = correction_band or DEFAULT_BANDS.get(correction, (0.5, 2.0))
        self.correction_veto = correction_veto
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

        # 1. the ratio
        if self.proximal == "behaviour":
            proximal_BT = behaviour_BT
        elif self.proximal == "detach":
            proximal_BT = log_prob_BT.detach()
        else:
            missing = "Couldn't find the log-prob of the proximal policy"
            proximal_BT = batch.column(td, keys.proximal_log_prob, missing).to(log_prob_BT)
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
        aggregate_BT = self._token_weights(mask_BT, counts, group_id_B, log_prob_BT.dtype)

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
            missing = "Couldn't find the ref log-prob"
            others.append(("ref", self.kl_to_ref_coeff, batch.column(td, keys.ref_log_prob, missing).to(log_prob_BT)))
        if self.kl_to_inference_coeff is not None:
            others.append(("inference", self.kl_to_inference_coeff, behaviour_BT))
        for name, coefficient, other_BT in others:
            kl_BT = fn.kl_estimate(log_prob_BT, other_BT, mask_BT, self.kl_estimator, log_ratio_BT=token_log_ratio_BT)
            terms[f"loss_kl_to_{name}"] = coefficient * aggregate(kl_BT)
            measured[f"kl_to_{name}"] = kl_BT.detach()

        with torch.no_grad():
            trainer_BT = proximal_BT if self.proximal == "recomputed" else log_prob_BT
            clipped = self._clipped(log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT)
            metrics = self._metrics(
                measured, mask_BT, counts, log_ratio_BT, clipped, weight_BT, drift_BT, trainer_BT - behaviour_BT
            )
        return GRPOLossOutput(**terms, **metrics, batch_size=[])

    def _read_mask(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        keys = self.tensor_keys
        batch = PaddedBatch.read(
            td, reader="GRPOLoss", tokens_key=keys.tokens, attention_key=keys.attention_mask, device=self.device
        )
        return batch, batch.trained_mask(td, self.masking_strategy, keys.assistant_mask, keys.response)

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
                return below_BT & (advantage_BT < 0), above_BT & (advantage_BT > 0)
            case "cispo":
                return below_BT, above_BT
            case "dppo":
                return fn.dppo_outside(log_prob_BT, behaviour_BT, mask_BT, advantage_BT, low=low, high=high)
            case _:
                return torch.zeros_like(mask_BT), torch.zeros_like(mask_BT)

    def _token_weights(
        self, mask_BT: Tensor, counts: StepCounts, group_id_B: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        aggregation = "sum" if self.aggregation == "none" else self.aggregation
        return fn.token_weights(
            mask_BT, aggregation, counts, max_length=self.max_length, group_id_B=group_id_B, dtype=dtype
        )

    def _metrics(
        self,
        measured: dict[str, Tensor],
        mask_BT: Tensor,
        counts: StepCounts,
        log_ratio_BT: Tensor,
        clipped: tuple[Tensor, Tensor],
        weight_BT: Tensor,
        drift_BT: Tensor,
        mismatch_BT: Tensor,
    ) -> dict[str, Tensor]:
        def mean(value_BT: Tensor) -> Tensor:
            return value_BT.masked_fill(~mask_BT, 0).sum() / counts.tokens

        ratio_BT, importance_BT = log_ratio_BT.exp(), drift_BT.exp().masked_fill(~mask_BT, 0.0)
        mismatch_BT = mismatch_BT.masked_fill(~mask_BT, 0.0).abs()
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
            "ratio_max": ratio_BT.masked_fill(~mask_BT, 0.0).amax(),
            "correction_mean": mean(weight_BT),
            "masked_fraction": mean((weight_BT == 0).to(ratio_BT)),
            "mismatch_mean": mean(mismatch_BT),
            "mismatch_max": mismatch_BT.amax(),
            "weight_sum": weight_sum,
            "weight_square_sum": weight_square_sum,
        }


def _untruncated(td: TensorDictBase, key: NestedKey) -> NestedKey:
    """The entry "plain" beside the log-probs "full" of the sampled tokens, where the batch has one, else ``key``.

    A ratio compares two policies; the renormalised rest of a truncated distribution is not one of the trainer's.
    """
    if isinstance(key, tuple) and key[-1] == "full":
        plain = (*key[:-1], "plain")
        if td.get(plain, None, as_list=True) is not None:
            return plain
    return key


def _effective_fraction(weight_sum: Tensor, weight_square_sum: Tensor, tokens: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), in (0, 1]; 0 for no tokens."""
    return weight_sum.square() / (tokens * weight_square_sum).clamp(min=torch.finfo(weight_sum.dtype).tiny)
