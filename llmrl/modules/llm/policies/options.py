"""Checks a wrapper's arguments, and converts its ``generate_kwargs`` to ``SamplingParams``.

An option that is unknown, or that the engine does not support, is an error that suggests the nearest known name; no
option is silently dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch

from llmrl.errors import ConfigError, check_at_least, did_you_mean
from llmrl.modules.llm.engines import SamplingParams
from llmrl.modules.llm.policies.batching import check_batching


def container_keys(settings: Any) -> dict[str, str]:
    """The key of each container, from the arguments of a wrapper."""
    return {name: getattr(settings, f"{name}_key") for name in ("text", "masks", "tokens", "log_probs", "history")}


def check_settings(who: str, settings: Any, options: GenerationOptions) -> None:
    """Raises ConfigError if arguments of a wrapper contradict each other or are not supported."""
    for name in ("generate", "pad_output"):
        if not isinstance(getattr(settings, name), bool):
            raise ConfigError(f"{who}: {name} must be True or False: got {getattr(settings, name)!r}.")
    if not settings.generate and settings.return_log_probs is False:
        raise ConfigError(f"{who}: return_log_probs must be True when generate=False: scoring writes nothing else.")
    if options.logprobs is not None and settings.return_log_probs not in (None, options.logprobs):
        raise ConfigError(f"{who}: generate_kwargs logprobs={options.logprobs} contradicts return_log_probs.")
    if settings.layout not in (None, torch.strided):
        raise ConfigError(
            f"{who}: layout must be torch.strided: got {settings.layout}; rows are stored ragged, read them with "
            "td.get(key, as_nested_tensor=True, layout=torch.jagged)."
        )
    samples = (settings.num_samples, options.num_return_sequences)
    if not (samples[0] is None or _is_count(samples[0])):
        raise ConfigError(f"{who}: num_samples must be a positive integer: got {samples[0]!r}.")
    if None not in samples and samples[0] != samples[1]:
        raise ConfigError(
            f"{who}: num_samples and num_return_sequences mean the same and must be equal: got {samples[0]} and "
            f"{samples[1]}."
        )
    if samples != (None, None) and settings.inplace is True:
        raise ConfigError(f"{who}: num_samples changes the batch size, so inplace must not be True.")
    for name, allowed in (("inplace", (None, True, False, "empty")), ("prefer_tokens", (True, False, "always"))):
        if getattr(settings, name) not in allowed:
            words = f"True, False or {allowed[-1]!r}"
            raise ConfigError(f"{who}: {name} must be {words}: got {getattr(settings, name)!r}.")
    check_batching(settings)
    check_at_least(who, 2, max_conversation_tokens=settings.max_conversation_tokens)
    keys = list(container_keys(settings).values())
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{who}: each container must have its own key: got {', '.join(map(repr, keys))}.")
    for name in ("padding", "return_tensors", "truncation"):
        if name in (settings.tokenizer_kwargs or {}):
            raise ConfigError(f"{who}: tokenizer_kwargs must not set {name}: rows are ragged and whole.")


_NOT_GIVEN = ("stop_strings", "extra")  # set under other names: see _LEGACY, VLLM_OPTIONS
_LEGACY = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_strings": "stop_sequences",
    "stop": "stop_sequences",
}
_SAMPLING = (*(field.name for field in fields(SamplingParams) if field.name not in _NOT_GIVEN), "stop_sequences")
_OTHER = ("num_return_sequences", "skip_special_tokens", "logprobs", "seed")
_SEARCH = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}  # beam search options -> neutral values
_KNOWN = (*_SAMPLING, *_OTHER, *_SEARCH, *_LEGACY)
_OF_THE_WRAPPER = {
    "num_return_sequences": "policy.get_new_version(num_samples=...)",
    "n": "policy.get_new_version(num_samples=...)",
    "logprobs": "policy.get_new_version(return_log_probs=...)",
    "seed": "policy.seed = ..., or a 'seed' int64[B] in the batch",
}


@dataclass(frozen=True)
class GenerationOptions:
    """The content of ``generate_kwargs``."""

    params: SamplingParams
    num_return_sequences: int | None = None
    skip_special_tokens: bool = False
    logprobs: bool | None = None
    seed: int | None = None


def generation_options(*layers: Mapping[str, Any] | None, vllm: bool = False) -> GenerationOptions:
    """Reads one or more mappings; later ones override single names of earlier ones. Legacy names override the names
    that they stand for. ``vllm`` also accepts vLLM-specific options.

    Raises  ConfigError for an unknown name, a search option, or a value out of range

    >>> generation_options({"max_tokens": 8, "temperature": 0.7}, {"temperature": 0.0}).params.greedy
    True
    >>> generation_options({"temprature": 1.0})
    Traceback (most recent call last):
        ...
    llmrl.errors.ConfigError: generate_kwargs: unknown option 'temprature'. Did you mean 'temperature'?
    """
    known = (*_KNOWN, *VLLM_OPTIONS) if vllm else _KNOWN
    options: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        for name in layer or ():
            if name not in known:
                alone = "; it is a vLLM-specific option." if name in VLLM_OPTIONS else "."
                raise ConfigError(f"generate_kwargs: unknown option {name!r}{alone}{did_you_mean(name, known)}")
        named = standard_names(layer)
        options |= named
        if number and "temperature" in named and "do_sample" not in named:
            options.pop("do_sample", None)  # the later mapping decides between greedy and sampling
        if named.get("do_sample") is False and "temperature" not in named:
            options["temperature"] = 0.0
    temperature, do_sample = options.get("temperature", 1.0), options.get("do_sample")
    if do_sample is False and temperature != 0:
        raise ConfigError(
            f"generate_kwargs: greedy decoding (do_sample=False) needs temperature 0: got {temperature!r}."
        )
    if do_sample and temperature == 0:
        raise ConfigError("generate_kwargs: sampling (do_sample=True) needs a temperature above 0: got 0.")
    for name, neutral in _SEARCH.items():
        if options.get(name, neutral) not in (neutral, None):
            raise ConfigError(
                f"generate_kwargs: {name} must be {neutral!r}: got {options[name]!r}; engines do not search."
            )
    num, seed = options.get("num_return_sequences"), options.get("seed")
    if not (num is None or _is_count(num)):
        raise ConfigError(f"generate_kwargs: num_return_sequences must be a positive integer: got {num!r}.")
    if not (seed is None or isinstance(seed, Integral)):
        raise ConfigError(f"generate_kwargs: seed must be an integer: got {seed!r}.")
    extra = take_vllm_options(options)
    sampling = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    sampling["stop_strings"] = _several(sampling.pop("stop_sequences", ()), str)
    sampling["stop_token_ids"] = _several(sampling.get("stop_token_ids", ()), int)
    return GenerationOptions(
        params=SamplingParams(**sampling, extra=extra),
        num_return_sequences=num,
        skip_special_tokens=bool(options.get("skip_special_tokens", False)),
        logprobs=None if options.get("logprobs") is None else options["logprobs"] is not False,
        seed=seed,
    )


def options_of_call(
    own: Mapping[str, Any] | None, given: Mapping[str, Any], *, vllm: bool = False
) -> GenerationOptions:
    """The wrapper's options, overridden by those of one call. Raises ConfigError for options that a call cannot change.

    >>> options_of_call({"temperature": 0.7, "max_new_tokens": 9}, {"max_new_tokens": 4}).params.temperature
    0.7
    """
    for name, instead in _OF_THE_WRAPPER.items():
        if name in given:
            raise ConfigError(f"generate_kwargs: {name} belongs to the wrapper, not to a call: use {instead}.")
    return generation_options(own, given, vllm=vllm)


def standard_names(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replaces legacy names by the names that they stand for; legacy values override existing ones.

    >>> standard_names({"n": 2, "temperature": 0.5})
    {'temperature': 0.5, 'num_return_sequences': 2}
    """
    options = dict(options or {})
    legacy = {_LEGACY[name]: options.pop(name) for name in list(options) if name in _LEGACY}
    return options | legacy


def with_stop_ids(
    params: SamplingParams, own: tuple[int, ...], of_engine: Collection[int]
) -> tuple[SamplingParams, frozenset[int]]:
    """Adds the wrapper's ``own`` stop ids to the parameters; returns them and all ids that end a response. With
    ``ignore_eos`` only the given ``stop_token_ids`` do.
    """
    if params.ignore_eos:
        return params, frozenset(params.stop_token_ids)
    params = replace(params, stop_token_ids=own + params.stop_token_ids)
    return params, frozenset((*params.stop_token_ids, *of_engine))


def _several(value: Any, kind: type) -> tuple[Any, ...]:
    """One value or a sequence of values, as a tuple."""
    return (value,) if isinstance(value, kind) else tuple(value)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 1


# --- vLLM-specific options: passed on, or refused with the reason ---------------------------------------------------


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_penalty(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and -2 <= value <= 2


_HANDED_ON: dict[str, tuple[Any, Callable[[Any], bool], str]] = {  # neutral value, check, rule
    "presence_penalty": (0, _is_penalty, "a number within [-2, 2]"),
    "frequency_penalty": (0, _is_penalty, "a number within [-2, 2]"),
    "min_tokens": (0, lambda value: _is_int(value) and value >= 0, "a non-negative integer"),
    "logit_bias": ({}, lambda value: isinstance(value, dict) and all(map(_is_int, value)), "a mapping of token ids"),
    "allowed_token_ids": (None, lambda value: bool(value) and all(map(_is_int, value)), "token ids"),
    "bad_words": ([], lambda value: all(isinstance(word, str) and word for word in value), "non-empty strings"),
}
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # allowed values, why others are refused
    "best_of": ((1,), "the log-probs of an answer are not those of one that was picked from several"),
    "logits_processors": (([],), "log-probs of logits that a function changed are not those of the policy"),
    "prompt_logprobs": ((), "a wrapper with generate=False scores a whole conversation"),
    "truncate_prompt_tokens": ((), "the model would see other ids than those of the prompt"),
    "include_stop_str_in_output": ((True,), "a response holds all sampled tokens, including its stop string"),
    "output_kind": ((), "answers are returned once, when they are complete"),
    "guided_decoding": ((), "answers are not constrained by a grammar; allowed_token_ids limits their tokens"),
    "structured_outputs": ((), "answers are not constrained by a grammar; allowed_token_ids limits their tokens"),
}
_WITHOUT_EFFECT = ("detokenize", "spaces_between_special_tokens")  # the wrapper decodes text from the ids
VLLM_OPTIONS = (*_HANDED_ON, *_REFUSED, *_WITHOUT_EFFECT)


def take_vllm_options(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Removes vLLM's own options from ``options``; returns those that affect sampling, as (name, value).

    Raises  ConfigError for a value out of range, and for options that would make ids or log-probs wrong

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
