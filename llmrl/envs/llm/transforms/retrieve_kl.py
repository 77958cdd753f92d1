"""A reference's log-probs and the KL penalty to it as one transform: `RetrieveKL`, and `KLRewardTransform` for short.

Both only put `log_probs.RetrieveLogProb` and `kl.KLComputation` together under the arguments that users know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey

from llmrl.envs.llm.transforms.kl import GEN, REF, KLComputation, Reduction, check_different
from llmrl.envs.llm.transforms.log_probs import FullKey, RetrieveLogProb, Scorer, full_key
from llmrl.envs.transforms.base import Compose
from llmrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["KLRewardTransform", "RetrieveKL"]


class RetrieveKL(Compose):
    """The log-probs of a reference, where wanted those of the policy anew, and the KL penalty between the two.

    Reads, Calls, Writes  as `RetrieveLogProb` and `KLComputation`
    Raises  ConfigError without a reference, for a model that generates, for wrappers of which only one pads its output,
            and for one key for both log-probs; what the two raise

    gen_model    "from_collector": the log-probs that the policy wrote when it sampled. A wrapper with
                 ``generate=False``, or an engine: the tokens are scored by it, into ("next", *gen_log_probs_full_key)
    ref_model    the reference; or, with ``reference="adapter_off"``, the policy's own PEFT model
    gen_model_factory, ref_model_factory  called once, here, for a model that is not there yet
    temperature  that both are scored at; None: that of ``gen_model``, else the reference's own
    use_ray_service  must be False: to score in another process, give an engine that lives there

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
        assistant_only: bool = True,
        history_key: str | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        padding_side: Literal["left", "right"] = "left",
        gen_log_probs_full_key: FullKey = GEN,
        ref_log_probs_full_key: FullKey = REF,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Any = 1.0,
        use_ray_service: bool = False,
        reference: Literal["model", "adapter_off"] = "model",
        temperature: float | None = None,
        reduction: Reduction | None = None,
    ):
        who = type(self).__name__
        check_different(gen_log_probs_full_key, ref_log_probs_full_key, who)
        given = None if gen_model == "from_collector" else gen_model
        gen = _one_model("gen", given, gen_model_factory, who, use_ray_service)
        ref = _one_model("ref", ref_model, ref_model_factory, who, use_ray_service)
        if ref is None:
            raise ConfigError(f"{who}: there must be a reference: pass ref_model or ref_model_factory.")
        pads = [getattr(model, "pad_output", None) for model in (gen, ref)]
        if None not in pads and pads[0] != pads[1]:
            raise ConfigError(
                f"{who}: both models must have the same pad_output: got {pads[0]} for gen_model and {pads[1]} for "
                "ref_model."
            )
        if temperature is None:
            temperature = getattr(gen, "temperature", None)
        common = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
            "temperature": temperature,
        }
        if history_key is not None:
            gen, ref = (
                model.get_new_version(history_key=history_key) if hasattr(model, "get_new_version") else model
                for model in (gen, ref)
            )
        scorers = [RetrieveLogProb(ref, log_probs_full_key=ref_log_probs_full_key, reference=reference, **common)]
        if gen is not None:
            scorers.insert(0, RetrieveLogProb(gen, log_probs_full_key=gen_log_probs_full_key, **common))
        computation = KLComputation(
            gen_log_probs_full_key,
            ref_log_probs_full_key,
            kl_key=kl_key,
            add_to_reward=add_to_reward,
            coeff=coeff,
            padding_side=padding_side,
            reduction=reduction,
        )
        super().__init__(*scorers, computation)


class KLRewardTransform(Compose):
    """Takes ``coef`` times the KL from a reference off the reward: `RetrieveKL` with the policy's own log-probs.

    Reads   in_keys[0] of ``next`` ("reward"), ``log_prob_key``, and what `RetrieveLogProb` reads
    Writes  out_keys: the reward, the container of the penalty, that of the reference's log-probs, all in ``next``;
            default ["reward", "kl_penalty", "ref_log_probs"]. See `KLComputation` for the shape of the reward
    Raises  as `RetrieveKL`; ConfigError for other than one in_key and three out_keys

    >>> from llmrl.testing import FakeEngine
    >>> KLRewardTransform(FakeEngine([torch.tensor([1])]), coef=0.1)[1].coeff
    0.1
    """

    def __init__(
        self,
        ref_model: Scorer | None = None,
        *,
        ref_model_factory: Callable[[], Scorer] | None = None,
        coef: float | Any = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: FullKey = GEN,
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_only: bool = True,
        padding_side: Literal["left", "right"] = "left",
        use_ray_service: bool = False,
        reference: Literal["model", "adapter_off"] = "model",
        temperature: float | None = None,
        reduction: Reduction | None = None,
    ):
        in_keys = ["reward"] if in_keys is None else list(in_keys)
        out_keys = [*in_keys[:1], "kl_penalty", "ref_log_probs"] if out_keys is None else list(out_keys)
        if len(in_keys) != 1 or len(out_keys) != 3 or out_keys[0] != in_keys[0]:
            raise ConfigError(
                "KLRewardTransform: in_keys must be [reward] and out_keys [the same reward, penalty, log-probs of the "
                f"reference]: got {in_keys} and {out_keys}."
            )
        who = type(self).__name__
        ref = _one_model("ref", ref_model, ref_model_factory, who, use_ray_service)
        if ref is None:
            raise ConfigError(f"{who}: there must be a reference: pass ref_model or ref_model_factory.")
        key = full_key((out_keys[2], "full"), who)
        retrieve = RetrieveLogProb(
            ref,
            log_probs_full_key=key,
            assistant_only=assistant_only,
            device=device,
            tokenizer=tokenizer,
            padding_side=padding_side,
            reference=reference,
            temperature=temperature,
        )
        computation = KLComputation(
            log_prob_key,
            key,
            kl_key=out_keys[1],
            add_to_reward=add_to_reward,
            coeff=coef,
            padding_side=padding_side,
            reduction=reduction,
            reward_key=in_keys[0],
        )
        super().__init__(retrieve, computation)


def _one_model(
    name: str, model: Scorer | None, factory: Callable[[], Scorer] | None, who: str, use_ray_service: bool
) -> Scorer | None:
    if use_ray_service:
        raise ConfigError(
            f"{who}: use_ray_service must be False: a model in another process is reached through its engine; pass "
            "that as the model."
        )
    if factory is None:
        return model
    if model is not None:
        raise ConfigError(f"{who}: give one of {name}_model and {name}_model_factory, not both.")
    return factory()
