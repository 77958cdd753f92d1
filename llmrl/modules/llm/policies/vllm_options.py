"""The options that vLLM alone has among ``generate_kwargs``: which are handed on, and which are refused and why."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from llmrl.errors import ConfigError

__all__ = ["VLLM_OPTIONS", "take_vllm_options"]


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_penalty(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and -2 <= value <= 2


_HANDED_ON: dict[str, tuple[Any, Callable[[Any], bool], str]] = {  # neutral value, what holds of others
    "presence_penalty": (0, _is_penalty, "a number within [-2, 2]"),
    "frequency_penalty": (0, _is_penalty, "a number within [-2, 2]"),
    "min_tokens": (0, lambda value: _is_int(value) and value >= 0, "a non-negative integer"),
    "logit_bias": ({}, lambda value: isinstance(value, dict) and all(map(_is_int, value)), "a mapping of token ids"),
    "allowed_token_ids": (None, lambda value: bool(value) and all(map(_is_int, value)), "token ids"),
    "bad_words": ([], lambda value: all(isinstance(word, str) and word for word in value), "non-empty strings"),
}
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # values that change nothing, why others are refused
    "best_of": ((1,), "log-probs say nothing of answers that were picked from several"),
    "logits_processors": (([],), "log-probs of logits that a function changed are not those of the policy"),
    "prompt_logprobs": ((), "a wrapper with generate=False scores a whole conversation"),
    "truncate_prompt_tokens": ((), "the model would see other ids than those of the prompt"),
    "include_stop_str_in_output": ((True,), "a response is what was drawn, its stop string included"),
    "output_kind": ((), "an answer comes once, whole"),
    "guided_decoding": ((), "answers are not constrained by a grammar; allowed_token_ids limits their tokens"),
    "structured_outputs": ((), "answers are not constrained by a grammar; allowed_token_ids limits their tokens"),
}
_WITHOUT_EFFECT = ("detokenize", "spaces_between_special_tokens")  # text is decoded by the wrapper, from the ids
VLLM_OPTIONS = (*_HANDED_ON, *_REFUSED, *_WITHOUT_EFFECT)


def take_vllm_options(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Takes vLLM's own options out of ``options``: those that change what is drawn, as (name, value).

    Raises  ConfigError for a value out of range, and for what would make ids or log-probs untrue, with the reason

    >>> take_vllm_options({"presence_penalty": 0.5, "min_tokens": 0, "detokenize": True})
    (('presence_penalty', 0.5),)
    """
    taken = {name: options.pop(name) for name in VLLM_OPTIONS if name in options}
    taken = {name: value for name, value in taken.items() if value is not None}
    for name, (neutral, reason) in _REFUSED.items():
        if name in taken and taken[name] not in neutral:
            raise ConfigError(f"generate_kwargs: {name}={taken[name]!r} is not supported: {reason}.")
    handed_on = {name: taken[name] for name in _HANDED_ON if name in taken and taken[name] != _HANDED_ON[name][0]}
    for name, value in handed_on.items():
        _, holds, rule = _HANDED_ON[name]
        if not holds(value):
            raise ConfigError(f"generate_kwargs: {name} must be {rule}: got {value!r}.")
    return tuple(handed_on.items())
