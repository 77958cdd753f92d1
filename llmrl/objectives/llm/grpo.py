"""GRPO and its relatives: one loss over sampled tokens, with the ratio, surrogate, aggregation and KL as settings.

`GRPOLoss.forward` follows the algorithm from top to bottom. The formulas are in `functional`, the checked settings in
`settings`, published algorithms in `presets`, reading and padding in `batch`. `MCAdvantage` has written the advantages
beforehand.

Shapes: B sequences, T tokens. lp is the log-prob under the current weights, lg under the engine that sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
from torch import Tensor, nn

from llmrl.errors import ConfigError
from llmrl.modules.llm.head_scores import HeadFunction
from llmrl.modules.llm.log_probs import TokenScores
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import PaddedBatch, PolicyBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.objectives.metric import Metric

if TYPE_CHECKING:
    from llmrl.objectives.llm.teacher import TeacherTerm


@shows_values
class GRPOLossOutput(TensorClass["nocast"]):
    """Loss terms to sum and differentiate (``loss_*``), and detached metrics; all float32 scalars.

    Terms follow the aggregation of the loss, metrics are means over the trained tokens. Both are divided by counts of
    the whole step, so the outputs of its micro-batches add up (`merge_outputs`; except maxima and ESS). ``tokens`` and
    the two ``weight_*`` fields are plain sums. A field that was not computed is None.
    """

    loss_objective: Tensor
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    loss_observation: Tensor | None = None
    tokens: Tensor | None = None  # trained tokens of this batch
    clip_fraction: Tensor | None = None  # fraction of tokens clipped by the surrogate, dual clip included
    clip_fraction_low: Tensor | None = None
    clip_fraction_high: Tensor | None = None
    kl_approx: Tensor | None = None  # KL(engine || current), k3 on the sampled tokens
    ESS: Tensor | None = None  # effective sample size of the weights exp(lp - lg), as a fraction of the tokens
    entropy: Tensor | None = None
    kl_to_ref: Tensor | None = None
    kl_to_inference: Tensor | None = None
    observation: Tensor | None = None  # sum of -log p of the observations, over the number of trained tokens
    ratio_mean: Tensor | None = None  # of the ratio in the surrogate
    ratio_max: Tensor | None = None
    correction_mean: Tensor | None = None  # weight of the engine correction
    correction_max: Tensor | None = None
    masked_fraction: Tensor | None = None  # tokens that correction, veto or kl_mask_threshold give weight 0
    mismatch_mean: Tensor | None = None  # |log-prob of the trainer - log-prob of the engine|
    mismatch_max: Tensor | None = None
    weight_sum: Tensor | None = None  # sum of exp(lp - lg)
    weight_square_sum: Tensor | None = None

    @staticmethod
    def derived(merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics that are computed from the sums of a step."""
        return {"ESS": _effective_fraction(merged["weight_sum"], merged["weight_square_sum"], merged["tokens"])}


class GRPOLoss(LossModule):
    """Policy-gradient loss over the tokens that the policy sampled.

    Reads   ("tokens", "full")                int64 ragged[T]    or dense [B, T] with ("masks", "all_attention_mask")
            ("masks", "all_assistant_mask")   bool ragged[T]     the tokens to train, see `PaddedBatch.trained_mask`
            ("masks", "trained_from")         int64[B]           optional: trains only from this position on
            ("log_probs", "full")             float32 ragged[T]  behaviour: under the engine that sampled
            ("log_probs", "plain")            float32 ragged[T]  optional, replaces it: before top-p, top-k, min-p
            ("log_probs", "routes")           int16 ragged[T, layers, K]  optional: the experts to replay
            ("proximal_log_probs", "full")    float32 ragged[T]  if proximal="recomputed"
            ("next", "ref_log_probs", "full") float32 ragged[T]  if kl_to_ref_coeff is given; or at the root
            ("top_entropy", "full")           float32 ragged[T]  if top_entropy_quantile: 1 at the tokens that are
                                                               trained; not needed without ``normalizer``
            "advantage"                       float32[B, 1, 1], or [T, 1] per row
            "group_id"                        int64[B]           if aggregation="prompt-mean"
    Calls   actor_network.token_scores(ids, attention mask, select, entropy=) if it has that, else actor_network(td)
            for ("log_probs", "full")
    Returns GRPOLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  MissingKeyError, ShapeError for a column that does not fit the tokens, DataError for NaN on a trained token
            or a step without trained tokens; ConfigError for settings that contradict each other

    r = exp(lp - lo) is the ratio to the proximal policy, rho = exp(lo - lg) that of the proximal policy to the engine.

    ``settings``, or keyword arguments, which come before it; None leaves one at its default, `DEFAULTS`:

    clip_epsilon           bounds of the ratio, [1 - low, 1 + high]; one number for both sides
    ratio_level            "token", or "sequence": exp of the mean of lp - lo over the answer (GSPO)
    surrogate              "clip" (PPO), "cispo", "sapo", "dppo", or "reinforce" (-A lp, without a bound)
    dual_clip              with "clip": a loss of at most -dual_clip A where A < 0
    sapo_tau               with "sapo": its temperatures for A > 0 and A <= 0
    proximal               lo: "behaviour" (lg), "detach" (lp without gradient), "recomputed" (read from the batch)
    correction             weight for the difference of trainer and engine: "tis", "mask", "seq-tis", "seq-mask",
                           "geo-mask", "none"; None: "none" with proximal="behaviour", else "tis"
    correction_cap         largest rho of "tis", "seq-tis", "seq-mask" and "geo-mask"
    correction_band        bounds of rho, outside of which "mask" and "geo-mask" drop
    correction_veto        drops an answer in which a rho is outside of these bounds
    kl_mask_threshold      drops tokens with (lp - lg)^2 / 2 above it
    aggregation            "token" (mean over the tokens of the step), "seq-mean", "seq-sum", "dr_grpo", "prompt-mean",
                           "sum", "none" (per token, not normalised); "token_mean" is "token", "prompt_mean" "seq-mean"
    max_length             the divisor of "dr_grpo"
    kl_to_ref_coeff        weight of the KL from the reference, as a term of the loss
    kl_to_inference_coeff  weight of the KL from the engine that sampled
    kl_estimator           "k1", "k2", "k3", "k3+" or "k3-weighted"
    entropy_coeff          weight of the entropy bonus; with ``entropy_bonus=False`` entropy is not even measured
    observation            weight of -log p of the observations: all tokens after the first trained one of a row that
                           the assistant mask leaves out; aggregated like the other terms, by the same counts
    top_entropy_quantile   the surrogate trains only this share of the tokens, those of the highest entropy; entropy
                           bonus and KL act on all
    teacher                a `TeacherTerm`: adds the divergence from a teacher, with the weight of its options, as
                           ``loss_distill`` and ``distill``; the output is then a dict
    masking_strategy       which tokens are trained. "sft": the assistant's, or without a mask of them the response;
                           "rlhf": the same, and the mask is required; "generic": also all others with a behaviour
                           log-prob
    device                 where the batch is moved to

    ``on_tokens``, if set, is called in each forward pass with the batch, the mask of the trained tokens bool[B, T], and
    values per token by name: "trainer_logp" (from before the step's first update if recomputed, else current),
    "advantage", "ratio", and if computed "entropy", "kl_to_ref" and "kl_to_inference".
    """

    on_tokens: Callable[[TensorDictBase, Tensor, dict[str, Tensor]], None] | None = None
    teacher: TeacherTerm | None = None
    trains_log_probs: bool = True  # beside a teacher that is compared over several tokens
    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "response": reading.RESPONSE,
        "attention_mask": reading.ATTENTION_MASK,
        "assistant_mask": reading.ASSISTANT_MASK,
        "sample_log_prob": ("log_probs", "full"),
        "proximal_log_prob": ("proximal_log_probs", "full"),
        "ref_log_prob": ("next", "ref_log_probs", "full"),
        "top_entropy": ("top_entropy", "full"),
        "advantage": "advantage",
        "group_id": reading.GROUP_ID,
    }
    # Engine against trainer: after the first update of a step these would also measure the change by the updates.
    metrics: ClassVar = {
        "entropy": Metric("policy/entropy"),
        "ratio_mean": Metric("policy/ratio_mean"),
        "clip_fraction_low": Metric("policy/clip_low_frac"),
        "clip_fraction_high": Metric("policy/clip_high_frac"),
        "kl_to_ref": Metric("policy/kl_ref"),
        "observation": Metric(
            "policy/observation_nll", "-log p of all observations, over the number of trained tokens"
        ),
        "kl_approx": Metric("mismatch/kl", merge="first"),
        "mismatch_mean": Metric("mismatch/logp_abs_mean", merge="first"),
        "mismatch_max": Metric("mismatch/logp_abs_max", merge="first"),
        "correction_mean": Metric("mismatch/is_mean"),
        "correction_max": Metric("mismatch/is_max", merge="max"),
        "masked_fraction": Metric("mismatch/masked_frac"),
        "ESS": Metric("mismatch/ess", merge="first"),
    }

    def __init__(
        self,
        actor_network: nn.Module,
        settings: GRPOSettings | None = None,
        *,
        device: torch.device | str | None = None,
        teacher: TeacherTerm | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.device = None if device is None else torch.device(device)
        self.settings = GRPOSettings.from_keywords(**keywords).over(settings or GRPOSettings()).complete()
        if self.settings.aggregation == "dr_grpo" and self.settings.max_length is None:
            raise ConfigError("GRPOLoss: aggregation='dr_grpo' needs max_length, its divisor: got None.")
        if teacher is not None:
            self.use_teacher(teacher)

    def use_teacher(self, teacher: TeacherTerm) -> None:
        """Adds the divergence from a teacher to the loss."""
        from llmrl.objectives.llm.teacher import DIVERGENCE

        estimator = teacher.options.estimator
        if self.settings.observation is not None and estimator != "sample":
            raise ConfigError(
                f"GRPOLoss: observation is supported with a teacher of estimator 'sample' alone: got {estimator!r}."
            )
        self.teacher, self.metrics = teacher, {**self.metrics, "distill": DIVERGENCE}

    @property
    def reads_reference(self) -> bool:
        return self.settings.kl is not None

    @property
    def reads_proximal(self) -> bool:
        return self.settings.proximal == "recomputed"

    @property
    def reads_entropy(self) -> bool:
        return self.settings.top_entropy_quantile is not None

    def derived(self, merged: dict[str, Tensor]) -> dict[str, Tensor]:
        return GRPOLossOutput.derived(merged)

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        log_probs = placeholders(device)["log_probs"]
        own = {} if self.teacher is None else self.teacher.placeholder(device)
        return own | {
            "proximal_log_probs": log_probs.clone(),
            "top_entropy": log_probs.clone(),
            "next": TensorDict({"ref_log_probs": log_probs}, batch_size=[1]),
            "advantage": torch.zeros(1, 1, 1, device=device),
            "group_id": torch.zeros(1, dtype=torch.int64, device=device),
        }

    def describe(self) -> dict[str, str]:
        """Ratio, aggregation and KL in words, for the plan that a run prints."""
        return self.settings.describe()

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts tokens, sequences and groups in the whole batch of an optimizer step, on this rank."""
        return StepCounts.of(self._read(td)[1], reading.group_ids(td, self.tensor_keys.group_id))

    @torch.no_grad()
    def proximal_log_probs(self, td: TensorDictBase) -> Tensor:
        """Log-probs for ``proximal="recomputed"``: float[B, T], ragged rows padded on the right.

        Compute them before the step's first update, on exactly its micro-batches: in low precision the log-probs of a
        row depend on the batch in which it is computed.
        """
        return self._score(td, *self._read(td), entropy=False).log_probs

    @torch.no_grad()
    def entropies(self, td: TensorDictBase) -> Tensor:
        """float[B, T], NaN at tokens that are not trained; ragged rows padded on the right.

        Compute them before the step's first update, of all its tokens: `top_entropy_quantile` compares these.
        """
        tokens, mask_BT = self._read(td)
        return self._entropy(self._score(td, tokens, mask_BT, entropy=True)).masked_fill(~mask_BT, torch.nan)

    @torch.no_grad()
    def ask_teacher(self, td: TensorDictBase) -> Tensor:
        """What the teacher's columns are made of, see `TeacherTerm.ask`; ragged rows padded on the right."""
        return self.teacher.ask(td, *self._read(td))

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> GRPOLossOutput | dict[str, Tensor]:
        settings, (tokens, mask_BT) = self.settings, self._read(td)
        if settings.teacher is not None and self.teacher is None:
            raise ConfigError(
                "GRPOLoss: settings with a teacher need the teacher itself: got none; give teacher=TeacherTerm(...)."
            )
        needed = {"proximal": self.reads_proximal, "reference": self.reads_reference}
        needed["observations"] = settings.observation is not None
        batch = PolicyBatch.read(td, self.tensor_keys, tokens, mask_BT, **needed)
        counts = normalizer or StepCounts.of(mask_BT, batch.group_id_B)  # whole step, so that micro-batches add up
        scores = self.scores(td, batch)
        log_prob_BT = scores.log_probs
        batch = batch.to(log_prob_BT)
        behaviour_BT, advantage_BT = batch.behaviour_BT, batch.advantage_BT

        # The ratio of the current policy to the proximal one. GSPO has one ratio for the whole sequence.
        # "detach": ratio 1, with the gradient of log_prob.
        known = {"behaviour": behaviour_BT, "detach": log_prob_BT.detach(), "recomputed": batch.proximal_BT}
        proximal_BT = known[settings.proximal]
        token_log_ratio_BT = fn.log_ratio(log_prob_BT, proximal_BT, mask_BT)
        sequence_level = settings.ratio_level == "sequence"
        log_ratio_BT = fn.sequence_log_ratio(token_log_ratio_BT, mask_BT) if sequence_level else token_log_ratio_BT

        # The surrogate, times an importance weight per token: the engine that sampled has other kernels and precision
        # than the trainer, so its probabilities differ slightly even for the same weights.
        surrogate_BT, clipped = self.surrogate(log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT)
        drift_BT = fn.log_ratio(log_prob_BT, behaviour_BT, mask_BT)
        weight_BT = self._correction_weight(proximal_BT, behaviour_BT, drift_BT, mask_BT)
        if self.reads_entropy:
            is_top_BT = self._is_top(td, batch, scores, whole_step=normalizer is None)
            surrogate_BT = surrogate_BT.masked_fill(~is_top_BT, 0.0)

        # The terms, by name: per token, with the coefficient. Entropy and KL leave weight_BT out: they also act on
        # tokens that the correction drops.
        own = self.measure(log_ratio_BT.detach(), log_prob_BT.detach(), behaviour_BT, advantage_BT)
        further = dict(self.terms(td, batch, scores))
        terms = {"objective": (1.0, surrogate_BT * weight_BT)}
        measured = {**own, **({} if scores.entropy is None else {"entropy": scores.entropy.detach()})}
        if settings.entropy:
            terms["entropy"] = (-settings.entropy, scores.entropy)
        for name, coefficient, other_BT in (
            ("kl_to_ref", settings.kl, batch.reference_BT),
            ("kl_to_inference", settings.kl_inference, behaviour_BT),
        ):
            if coefficient is not None:
                kind = settings.kl_estimator
                kl_BT = fn.kl_estimate(log_prob_BT, other_BT, mask_BT, kind, log_ratio_BT=token_log_ratio_BT)
                terms[name], measured[name] = (coefficient, kl_BT), kl_BT.detach()
        terms |= {name: (1.0, value_BT) for name, value_BT in further.items()}
        if self.teacher is not None:
            further["distill"] = self.teacher.divergence(td, batch, scores)
            terms["distill"] = (self.teacher.options.coefficient, further["distill"])
        measured |= {name: value_BT.detach() for name, value_BT in further.items()}

        # The aggregation: all terms share one set of token weights, so their balance does not depend on the lengths.
        weights = partial(
            fn.token_weights,
            aggregation="sum" if settings.aggregation == "none" else settings.aggregation,
            counts=counts,
            max_length=settings.max_length,
            group_id_B=batch.group_id_B,
            dtype=log_prob_BT.dtype,
        )
        token_weight_BT = weights(mask_BT)

        def aggregate(value_BT: Tensor, mask_BT: Tensor = mask_BT, weight_BT: Tensor = token_weight_BT) -> Tensor:
            # Masked first: NaN outside the mask times a weight of 0 would be NaN.
            value_BT = value_BT.masked_fill(~mask_BT, 0.0) * weight_BT
            return value_BT if settings.aggregation == "none" else value_BT.sum()

        losses = {f"loss_{name}": weight * aggregate(value_BT) for name, (weight, value_BT) in terms.items()}
        if (observed_BT := batch.observed_BT) is not None:
            losses["loss_observation"] = settings.observation * aggregate(
                -log_prob_BT, observed_BT, weights(observed_BT)
            )
        # For the mismatch with the engine: the trainer's log-probs, if recomputed those from before the updates.
        trainer_BT = proximal_BT if self.reads_proximal else log_prob_BT.detach()
        if self.on_tokens is not None:
            told = {"trainer_logp": trainer_BT, "advantage": advantage_BT, "ratio": log_ratio_BT.detach().exp()}
            self.on_tokens(td, mask_BT, told | measured)
        metrics = _step_metrics(
            measured,
            mask_BT,
            counts.tokens,
            log_ratio_BT=log_ratio_BT,
            clipped=clipped,
            weight_BT=weight_BT,
            drift_BT=drift_BT,
            mismatch_BT=trainer_BT - behaviour_BT,
        )
        if observed_BT is not None:
            metrics["observation"] = -log_prob_BT.detach().masked_fill(~observed_BT, 0.0).sum() / counts.tokens
        return {**losses, **metrics} if own or further else GRPOLossOutput(**losses, **metrics, batch_size=[])

    def measure(
        self, log_ratio_BT: Tensor, log_prob_BT: Tensor, behaviour_BT: Tensor, advantage_BT: Tensor
    ) -> dict[str, Tensor]:
        """Numbers per token of a subclass, float[B, T]: their means over the trained tokens of the step are reported.

        `metrics` says under which names; the output of `forward` is then a dict.
        """
        return {}

    def scores(self, td: TensorDictBase, batch: PolicyBatch) -> TokenScores:
        """The actor's scores of the trained tokens, with grad; a subclass may compute more in the same pass."""
        head = None
        if self.teacher is not None:
            heat = getattr(self.actor_network, "temperature", self.teacher.temperature)
            given = {"trains": self.trains_log_probs, "temperature": heat}
            head = self.teacher.head(td, batch.tokens, batch.mask_BT, **given)
        return self._score(td, batch.tokens, batch.scored_BT, entropy=self.settings.entropy_bonus, head=head)

    def _is_top(self, td: TensorDictBase, batch: PolicyBatch, scores: TokenScores, *, whole_step: bool) -> Tensor:
        """bool[B, T]: the tokens that the surrogate trains."""
        key = self.tensor_keys.top_entropy
        if whole_step and td.get(key, None, as_list=True) is None:
            entropy_BT = self._entropy(scores).detach()
            quantile = self.settings.top_entropy_quantile
            return entropy_BT >= fn.entropy_threshold(entropy_BT[batch.mask_BT], quantile)
        missing = "Which tokens have the highest entropy must be known for the whole step, before its first update"
        return batch.tokens.column(td, key, missing) > 0

    def _entropy(self, scores: TokenScores) -> Tensor:
        if scores.entropy is None:
            raise ConfigError(
                "GRPOLoss: top_entropy_quantile needs entropy_bonus=True and an actor with token_scores: got none of "
                f"one from {type(self.actor_network).__name__}."
            )
        return scores.entropy

    def terms(self, td: TensorDictBase, batch: PolicyBatch, scores: TokenScores) -> dict[str, Tensor]:
        """Further terms of a subclass by name, float[B, T] with grad, aggregated like the others, and reported."""
        return {}

    def _read(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        tokens = PaddedBatch.read(td, self.tensor_keys, reader="GRPOLoss", device=self.device)
        return tokens, tokens.trained_mask(td, self.tensor_keys, self.settings.masking_strategy)

    def _score(
        self,
        td: TensorDictBase,
        tokens: PaddedBatch,
        mask_BT: Tensor,
        *,
        entropy: bool,
        head: HeadFunction | None = None,
    ) -> TokenScores:
        given = {"log_probs_key": self.tensor_keys.sample_log_prob, "entropy": entropy, "head": head}
        scores = reading.actor_scores(self.actor_network, td, tokens, mask_BT, **given)
        if entropy and self.settings.entropy and scores.entropy is None:
            raise ConfigError(
                f"GRPOLoss: entropy_coeff={self.settings.entropy} needs an actor with token_scores: got "
                f"{type(self.actor_network).__name__}, which returns log-probs only."
            )
        return scores

    def _correction_weight(
        self, proximal_BT: Tensor, behaviour_BT: Tensor, drift_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        settings = self.settings
        weight_BT = fn.correction_weight(proximal_BT, behaviour_BT, mask_BT, **settings.engine_correction)
        if settings.correction_veto is not None:
            low, high = settings.correction_veto
            veto_BT = fn.sequence_veto(proximal_BT, behaviour_BT, mask_BT, low=low, high=high)
            weight_BT = weight_BT.masked_fill(veto_BT, 0.0)
        if settings.kl_mask_threshold is not None:
            # (lp - lg)^2 / 2 is the k2 estimate of the KL between engine and current policy at this token.
            weight_BT = weight_BT.masked_fill(0.5 * drift_BT.detach().square() > settings.kl_mask_threshold, 0.0)
        return weight_BT

    def surrogate(
        self, log_ratio_BT: Tensor, log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What each token adds to the loss, float[B, T], with grad; a subclass may override this alone.

        Returns also two masks bool[B, T]: the tokens clipped at the lower bound and at the upper one
        """
        settings = self.settings
        low, high = settings.clip
        ratio_BT = log_ratio_BT.detach().exp()
        below_BT, above_BT = ratio_BT < 1 - low, ratio_BT > 1 + high
        nowhere_BT = torch.zeros_like(mask_BT)
        match settings.surrogate:
            case "clip":  # the minimum clips only where A pushes the ratio further out
                held_BT = above_BT & (advantage_BT > 0)
                if settings.dual_clip is not None:
                    held_BT |= (ratio_BT > settings.dual_clip) & (advantage_BT < 0)
                surrogate_BT = fn.clipped_surrogate(
                    log_ratio_BT, advantage_BT, low=low, high=high, dual_clip=settings.dual_clip
                )
                return surrogate_BT, (below_BT & (advantage_BT < 0), held_BT)
            case "cispo":
                return fn.cispo(log_ratio_BT, log_prob_BT, advantage_BT, low=low, high=high), (below_BT, above_BT)
            case "dppo":
                policies = (log_prob_BT, behaviour_BT, mask_BT, advantage_BT)
                return fn.dppo(*policies, low=low, high=high), fn.dppo_outside(*policies, low=low, high=high)
            case "sapo":
                positive, other = settings.taus
                surrogate_BT = fn.sapo(log_ratio_BT, advantage_BT, tau_positive=positive, tau_negative=other)
                return surrogate_BT, (nowhere_BT, nowhere_BT)
            case _:
                return fn.reinforce(log_prob_BT, advantage_BT), (nowhere_BT, nowhere_BT)


@torch.no_grad()
def _step_metrics(
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

    The tensors in ``measured`` are averaged under their own names. ``clipped`` holds the masks of the tokens clipped at
    the lower and the upper bound, ``drift_BT`` is lp - lg, ``mismatch_BT`` the trainer's log-probs minus lg.
    """

    def mean(value_BT: Tensor) -> Tensor:
        return value_BT.masked_fill(~mask_BT, 0).sum() / num_tokens

    def largest(value_BT: Tensor) -> Tensor:  # of values that are not negative
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
    """Effective sample size over n tokens, (sum w)^2 / (n sum w^2): in (0, 1], or 0 without tokens."""
    return weight_sum.square() / (tokens * weight_square_sum).clamp(min=torch.finfo(weight_sum.dtype).tiny)
