"""Several rewards as one list: `make_rewards` turns what a settings file says about them into transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.envs.llm.transforms.reward import RewardFunction
from llmrl.envs.llm.transforms.reward_source import Reward
from llmrl.errors import ConfigError, did_you_mean

__all__ = ["make_rewards"]

_OPTIONS = ("name", "weight", "deadline_s", "retries", "concurrency", "answer_key", "batched", "process")
_KINDS = ("fn", "judge", "reward_model", "code")
_DEADLINES = {"judge": 600.0, "reward_model": 600.0, "code": 600.0}  # they have deadlines of their own per row

Spec = Mapping[str, Any] | str | Reward


def make_rewards(specs: Sequence[Spec], *, tokenizer: Any | None = None) -> list[RewardFunction]:
    """The transforms of a list of weighted rewards; each adds to "reward" and writes "reward_<name>" of its own.

    Reads   per reward, one of ``fn`` (a function or its name), ``judge``, ``reward_model``, ``code`` (the arguments of
            `JudgeReward`, `RewardModelScorer.load`, `CodeReward`), and ``weight``, ``name``, ``deadline_s``,
            ``retries``, ``concurrency``, ``answer_key``, ``batched``, ``process``, the arguments of `RewardFunction`. A
            function or a name alone is ``{fn: ...}``
    Raises  ConfigError naming the entry for an unknown key, none or several of the four, or two rewards of one name

    >>> [(r.name, r.weight) for r in make_rewards([{"fn": "math:isfinite", "weight": 0.5}, {"fn": len}])]
    [('isfinite', 0.5), ('len', 1.0)]
    """
    if isinstance(specs, (str, Mapping)) or not specs:
        raise ConfigError(f"rewards: must be a list with at least one reward: got {specs!r:.80}.")
    rewards = [_make(spec, f"rewards[{number}]", tokenizer) for number, spec in enumerate(specs)]
    for name, count in Counter(reward.name for reward in rewards).items():
        if count > 1:
            raise ConfigError(f"rewards: each must have a name of its own: {count} are called {name!r}; set name.")
    return rewards


def _make(spec: Spec, where: str, tokenizer: Any | None) -> RewardFunction:
    if not isinstance(spec, Mapping):
        spec = {"fn": spec}
    for key in spec:
        if key not in (*_KINDS, *_OPTIONS):
            raise ConfigError(
                f"{where}: {key!r} is not a setting of a reward.{did_you_mean(key, (*_KINDS, *_OPTIONS))}"
            )
    kinds = [kind for kind in _KINDS if spec.get(kind) is not None]
    if len(kinds) != 1:
        raise ConfigError(
            f"{where}: must have exactly one of {', '.join(_KINDS)}: got {' and '.join(kinds) or 'none of them'}."
        )
    options = {key: spec[key] for key in _OPTIONS if spec.get(key) is not None}
    if kinds[0] in _DEADLINES:
        options.setdefault("deadline_s", _DEADLINES[kinds[0]])
    return RewardFunction(_function(kinds[0], spec[kinds[0]], where), tokenizer=tokenizer, **options)


def _function(kind: str, value: Any, where: str) -> Reward | str:
    if kind == "fn":
        return value
    from llmrl.envs.llm import rewards  # here: what few runs need is not imported by all

    make = {"judge": rewards.JudgeReward, "reward_model": rewards.RewardModelScorer.load, "code": rewards.CodeReward}
    try:
        return make[kind](**value)
    except TypeError as error:  # an unknown or a missing argument
        raise ConfigError(f"{where}.{kind}: {error}.") from error
