"""The per-token KL penalty against a reference, subtracted from the reward; with or without scoring the reference.

The penalty is log p - log p_ref of the sampled token (the k1 estimate, arXiv:2203.02155). Only tokens that the policy
wrote count, so prompts and padding do not affect it. For a KL term in the loss instead of the reward, see `GRPOLoss`'s
``kl_to_ref_coeff``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.data.ragged.tensordicts import present_keys, required
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.options import split_keywords
from llmrl.envs.llm.transforms.log_probs import FullKey, RetrieveLogProb, Scorer, full_key, with_rows_spec
from llmrl.envs.transforms.base import Compose, Transform
from llmrl.errors import ConfigError, MissingKeyError, ShapeError, check_choice
from llmrl.modules.llm.log_probs import with_predecessor
from llmrl.modules.llm.policies.containers import LogProbs, own_part, response_part

Reduction = Literal["token", "sum", "mean"]

GEN: FullKey = ("log_probs", "full")
REF: FullKey = ("ref_log_probs", "full")


class KLComputation(Transform):
    """Writes the KL penalty of every token, and subtracts ``coeff`` times the penalty from the reward.

    Reads   gen_log_probs_full_key   float32 ragged[T] or [B, T]   from ``next`` if it was scored again, else as the
                                     policy wrote them; "plain" instead if sampling used top-k or top-p
            ref_log_probs_full_key   float32 ragged[T] or [B, T]   from ``next``
            ("masks", "all_assistant_mask")  bool, likewise        the tokens that count; all if it is missing
            ("tokens", "response"), ("masks", "trained_from"), ("next", reward_key) float32[B, 1, 1]
    Writes  ("next", *kl_key, "full") float32 ragged[T] or [B, T], 0 where the policy wrote no token
            ("next", reward_key)     float32[B, 1, 1], or [B, T, 1] for ``reduction="token"``
    Raises  MissingKeyError for absent log-probs, and in an env with ``add_to_reward`` for an absent reward; ShapeError
            if the shapes of log-probs or rewards do not match the tokens; ConfigError for contradictory settings

    reduction     "sum": reward - coeff * (sum of the turn's penalties); "mean": with their mean; "token" (padded rows
                  only): -coeff * penalty per token, plus the reward on the last token that the policy wrote. None:
                  "token" for padded rows, "sum" for ragged ones
    coeff         a number, or a KL controller, whose ``coef`` is read at every step and is the state of this transform

    In an env the reward of a turn covers that turn's own tokens; in a buffer the reward of a row covers its trained
    tokens. Data without "next" are read and written at their root; data without a reward get only the penalty. A NaN
    reward stays NaN.
    """

    def __init__(
        self,
        gen_log_probs_full_key: FullKey = GEN,
        ref_log_probs_full_key: FullKey = REF,
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Any = 1.0,
        padding_side: Literal["left", "right"] = "left",
        reduction: Reduction | None = None,
        reward_key: NestedKey = "reward",
    ):
        super().__init__()
        who = type(self).__name__
        check_choice(who, "padding_side", padding_side, ("left", "right"))
        self.gen_log_probs_full_key = full_key(gen_log_probs_full_key, who)
        self.ref_log_probs_full_key = full_key(ref_log_probs_full_key, who)
        if self.gen_log_probs_full_key == self.ref_log_probs_full_key:
            got = f"{self.gen_log_probs_full_key!r} for both"
            raise ConfigError(f"{who}: the log-probs of policy and reference must be under different keys: got {got}.")
        check_choice(who, "reduction", reduction, ("token", "sum", "mean", None))
        self.kl_key = kl_key
        self.add_to_reward = add_to_reward
        self.coeff = coeff
        self.reduction = reduction
        self.reward_key = reward_key

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        holder = td.get("next", td)
        pays = self.add_to_reward and holder.get(self.reward_key, None) is not None
        written = self._written(td, holder, "row" if pays else None)
        return td if holder is td else td.set("next", written)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._written(td, next_td, "turn" if self.add_to_reward else None)

    def state_dict(self) -> dict[str, Any]:
        return self.coeff.state_dict() if hasattr(self.coeff, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.coeff, "load_state_dict"):
            self.coeff.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        if self.add_to_reward and self.reduction in (None, "token") and self.reward_key in reward_spec:
            shape = (*reward_spec.shape, -1, 1)
            reward_spec[self.reward_key] = Unbounded(shape=shape, device=reward_spec.device)
        return with_rows_spec(reward_spec, self.kl_key)

    def _written(
        self, td: TensorDictBase, next_td: TensorDictBase, pays: Literal["row", "turn"] | None
    ) -> TensorDictBase:
        """Writes the penalties; the reward of ``next_td`` covers the turn's tokens, or the row's trained tokens."""
        gen, ref = self._log_probs(td, next_td)
        mask = td.get(("masks", "all_assistant_mask"), None, as_list=True)
        kl_BT, mask_BT, lengths = _penalties(gen, ref, mask, type(self).__name__)
        if pays is not None:
            attention = td.get(("masks", "all_attention_mask"), None, as_list=True)
            attention = pad_rows(attention) if isinstance(attention, list) else attention
            attended_BT = torch.ones_like(mask_BT) if attention is None else attention.to(mask_BT.device)
            own_BT = response_part(td, mask_BT, lengths) if pays == "turn" else own_part(td, mask_BT)
            # Each token is penalised once, in the turn or record that wrote it. A row's first token has no log-prob.
            paid_BT = with_predecessor(mask_BT if own_BT is None else mask_BT & own_BT, attended_BT)
            next_td.set(self.reward_key, self._reward(next_td, kl_BT, paid_BT, lengths))
        if lengths is None:
            container = LogProbs.from_padded({"full": kl_BT}, td.batch_size)
        else:
            rows = [row[:length] for row, length in zip(kl_BT, lengths, strict=True)]
            container = LogProbs.from_rows({"full": rows}, td.batch_size)
        next_td.set(self.kl_key, container)
        return next_td

    def _log_probs(self, td: TensorDictBase, next_td: TensorDictBase) -> tuple[Any, Any]:
        who = type(self).__name__
        gen = next_td.get(self.gen_log_probs_full_key, None, as_list=True)
        if gen is None:
            # With top-p or top-k sampling, only the plain log-probs are comparable with the reference.
            plain = (self.gen_log_probs_full_key[0], "plain")
            gen = td.get(plain, None, as_list=True)
            gen = td.get(self.gen_log_probs_full_key, None, as_list=True) if gen is None else gen
        if gen is None:
            raise MissingKeyError(
                f"{who}: the log-probs of the policy must be in {self.gen_log_probs_full_key!r}: keys present: "
                f"{present_keys(td)}; the policy writes them unless return_log_probs=False."
            )
        missing = "put a RetrieveLogProb before it, whose log-probs in 'next' are the reference's"
        return gen, required(next_td, self.ref_log_probs_full_key, who, missing, as_list=True)

    def _reward(self, next_td: TensorDictBase, kl_BT: Tensor, paid_BT: Tensor, lengths: list[int] | None) -> Tensor:
        missing = "append it after the transform that writes the reward, or pass add_to_reward=False"
        reward = required(next_td, self.reward_key, type(self).__name__, missing)
        if not reward.is_floating_point():
            reward = reward.float()
        reduction = self.reduction or ("token" if lengths is None else "sum")
        per_token = reduction == "token" and lengths is None and reward.numel() == kl_BT.numel()
        if reward.numel() != len(kl_BT) and not per_token:
            raise ShapeError(
                f"{type(self).__name__}: reduction={reduction!r} needs one reward per conversation, [{len(kl_BT)}, 1, "
                f"1]: got {list(reward.shape)}; reduce it first, or use reduction='token' with one per token."
            )
        coeff = getattr(self.coeff, "coef", self.coeff)
        penalty_BT = coeff * kl_BT.masked_fill(~paid_BT, 0.0).to(reward)
        paid_BT = paid_BT.to(reward.device)
        if reduction != "token":
            penalty_B = penalty_BT.sum(1)
            if reduction == "mean":
                penalty_B = penalty_B / paid_BT.sum(1).clamp(min=1)
            return reward - penalty_B.view(-1, *[1] * (reward.ndim - 1))
        if lengths is not None:
            raise ShapeError(
                f"{type(self).__name__}: rewards per token need rows of equal length, padded: got ragged rows of "
                f"{min(lengths)} to {max(lengths)} tokens; use reduction='sum', whose reward is their sum, or a policy "
                "with pad_output=True."
            )
        if per_token:
            return reward.view(*penalty_BT.shape, 1) - penalty_BT.unsqueeze(-1)
        places_T = torch.arange(paid_BT.shape[1], device=reward.device)
        # The reward of the turn goes to its last penalised token.
        last_B1 = (paid_BT * places_T).amax(1, keepdim=True)
        own_BT = torch.zeros_like(penalty_BT).scatter(1, last_B1, reward.view(-1, 1))
        return (own_BT - penalty_BT).unsqueeze(-1)


class RetrieveKL(Compose):
    """Scores tokens with a reference (and, with ``gen_model``, the policy again) and writes the KL penalty.

    Reads, Calls, Writes  as `RetrieveLogProb` and `KLComputation`
    Raises  ConfigError without a reference, for a model that generates, for two wrappers with different ``pad_output``,
            and if both log-probs have the same key; also the errors of these two transforms

    gen_model    "from_collector": the log-probs that the policy wrote when it sampled. A wrapper with
                 ``generate=False``, or an engine: scores the tokens into ("next", *gen_log_probs_full_key)
    ref_model    the reference; or, with ``reference="adapter_off"``, the policy's own PEFT model
    gen_model_factory, ref_model_factory  called once by the constructor, instead of passing a model
    temperature  for scoring with both models; None: that of ``gen_model``, else the reference's own
    use_ray_service  must be False: to score in another process, pass an engine of that process
    options      the other arguments of `RetrieveLogProb` and `KLComputation`

    >>> from llmrl.testing import FakeEngine
    >>> [type(t).__name__ for t in RetrieveKL(ref_model=FakeEngine([torch.tensor([1])]), coeff=0.1)]
    ['RetrieveLogProb', 'KLComputation']
    """

    def __init__(
        self,
        gen_model: Scorer | Literal["from_collector"] = "from_collector",
        ref_model: Scorer | None = None,
        *,
        gen_model_factory: Callable[[], Scorer] | None = None,
        ref_model_factory: Callable[[], Scorer] | None = None,
        history_key: str | None = None,
        gen_log_probs_full_key: FullKey = GEN,
        ref_log_probs_full_key: FullKey = REF,
        reference: Literal["model", "adapter_off"] = "model",
        temperature: float | None = None,
        use_ray_service: bool = False,
        **options: Any,
    ):
        who = type(self).__name__
        gen = None if gen_model == "from_collector" else gen_model
        gen = _one_model(who, "gen", gen, gen_model_factory, use_ray_service)
        ref = _one_model(who, "ref", ref_model, ref_model_factory, use_ray_service)
        pads = [getattr(model, "pad_output", None) for model in (gen, ref)]
        if None not in pads and pads[0] != pads[1]:
            raise ConfigError(
                f"{who}: both models must have the same pad_output: got {pads[0]} (gen_model), {pads[1]} (ref_model)."
            )
        scoring, penalty = split_keywords(options, who, RetrieveLogProb, KLComputation)
        # Both at the same temperature: otherwise the KL would also measure the difference in temperature.
        scoring["temperature"] = getattr(gen, "temperature", None) if temperature is None else temperature
        if history_key is not None:
            gen, ref = (
                model.get_new_version(history_key=history_key) if hasattr(model, "get_new_version") else model
                for model in (gen, ref)
            )
        scorers = [RetrieveLogProb(ref, log_probs_full_key=ref_log_probs_full_key, reference=reference, **scoring)]
        if gen is not None:
            scorers.insert(0, RetrieveLogProb(gen, log_probs_full_key=gen_log_probs_full_key, **scoring))
        super().__init__(*scorers, KLComputation(gen_log_probs_full_key, ref_log_probs_full_key, **penalty))


class KLRewardTransform(RetrieveKL):
    """Subtracts ``coef`` times the KL to a reference from the reward: `RetrieveKL` with the policy's own log-probs.

    Reads   in_keys[0] of ``next`` ("reward"), ``log_prob_key``, and the inputs of `RetrieveLogProb`
    Writes  out_keys: the reward, the container of the penalty, that of the reference's log-probs, all in ``next``;
            default ["reward", "kl_penalty", "ref_log_probs"]. See `KLComputation` for the shape of the reward
    Raises  as `RetrieveKL`; ConfigError unless there are one in_key and three out_keys

    ``options`` are the other arguments of `RetrieveKL`: ``ref_model_factory``, ``temperature`` and so on.

    >>> from llmrl.testing import FakeEngine
    >>> KLRewardTransform(FakeEngine([torch.tensor([1])]), coef=0.1)[1].coeff
    0.1
    """

    def __init__(
        self,
        ref_model: Scorer | None = None,
        *,
        coef: float | Any = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: FullKey = GEN,
        **options: Any,
    ):
        in_keys = ["reward"] if in_keys is None else list(in_keys)
        out_keys = [*in_keys[:1], "kl_penalty", "ref_log_probs"] if out_keys is None else list(out_keys)
        if len(in_keys) != 1 or len(out_keys) != 3 or out_keys[0] != in_keys[0]:
            raise ConfigError(
                "KLRewardTransform: in_keys must be [reward] and out_keys [the same reward, penalty, log-probs of the "
                f"reference]: got {in_keys} and {out_keys}."
            )
        reward_key, kl_key, ref_name = out_keys
        super().__init__(
            ref_model=ref_model,
            gen_log_probs_full_key=log_prob_key,
            ref_log_probs_full_key=(ref_name, "full"),
            coeff=coef,
            kl_key=kl_key,
            reward_key=reward_key,
            **options,
        )


def _one_model(
    who: str, name: str, model: Scorer | None, factory: Callable[[], Scorer] | None, use_ray_service: bool
) -> Any:
    if use_ray_service:
        raise ConfigError(f"{who}: use_ray_service must be False: pass the engine of a model in another process.")
    if factory is not None and model is not None:
        raise ConfigError(f"{who}: give one of {name}_model and {name}_model_factory, not both.")
    model = model if factory is None else factory()
    if model is None and name == "ref":
        raise ConfigError(f"{who}: a reference is required: pass ref_model or ref_model_factory.")
    return model


def _penalties(gen: Any, ref: Any, mask: Any, who: str) -> tuple[Tensor, Tensor, list[int] | None]:
    """The penalties float[B, T], the tokens that count bool[B, T], and the lengths of ragged rows (right-padded here;
    None for rows that were padded already)."""
    columns = [("the policy's log-probs", gen), ("the reference's log-probs", ref)]
    columns += [] if mask is None else [("the assistant mask", mask)]
    lengths = [len(row) for row in gen] if any(isinstance(column, list) for _, column in columns) else None
    # Checks lengths before padding, because padding makes all rows equally long.
    for what, column in columns[1:]:
        got, expected = (column.shape, gen.shape) if lengths is None else ([len(row) for row in column], lengths)
        if got != expected:
            where = "" if lengths is None else " by row"
            raise ShapeError(
                f"{who}: {what} must have one value per token{where}: got {list(got)}, expected {list(expected)}."
            )
    if lengths is None:
        mask_BT = torch.ones_like(gen, dtype=torch.bool) if mask is None else mask.bool()
    else:
        gen, ref = pad_rows(list(gen)), pad_rows(list(ref))
        mask_BT = lengths_mask(lengths, gen.shape[1]) if mask is None else pad_rows(list(mask)).bool()
    mask_BT = mask_BT.to(gen.device)
    return (gen - ref.to(gen.device)).masked_fill(~mask_BT, 0.0), mask_BT, lengths
