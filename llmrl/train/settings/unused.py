"""Settings that have no effect beside the others: one table of what each of them needs. Each such setting is an error.

Values equal to the default are never errors: the settings that a run has written name them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmrl.data.llm.dataset_files import FILE_FORMATS
from llmrl.objectives.llm.presets import PRESETS
from llmrl.train.settings.environment import SHARED_BY_SOURCES
from llmrl.train.settings.types import EMBEDDED

_OWN_TASKS = (*EMBEDDED, "sums_mistakes")


def _is_file(name: str | None) -> bool:
    """True for a file or a pattern of files, which have one split."""
    return name is not None and (Path(name).suffix.lower() in FILE_FORMATS or Path(name).expanduser().is_file())


def _is_named(name: str | None) -> bool:
    """True for a name on the hub, which may have configurations."""
    return name is not None and name not in _OWN_TASKS and not _is_file(name) and not Path(name).expanduser().exists()


def _is_measured(config: Any) -> bool:
    """True if there are rows to measure that are not trained on."""
    if config.eval.dataset is not None or config.eval.sets:
        return True
    env, data = getattr(config, "env", None), getattr(config, "data", None)
    if env is not None and env.is_mix:
        return any(source.eval_dataset or _has_own_problems(source) for source in env.mix)
    if env is not None:
        return _has_own_problems(env)
    return data is None or (getattr(config, "measures_rows", False) and not _is_file(data.path))


def _has_own_problems(env: Any) -> bool:
    return env.name != "chat" and (env.dataset is None or not Path(env.dataset).exists())


def _generates(config: Any) -> bool:
    return config.env is not None and _is_measured(config)


def _has_splits(name: str, held: str) -> Callable[[Any], bool]:
    return lambda config: not _is_file(getattr(getattr(config, held, None), name, None))


def _rolls_out(config: Any) -> bool:
    return hasattr(config, "rollout")


def _runs_functions(config: Any) -> bool:
    env = config.env
    listed = any(reward.fn for reward in env.rewards or ())
    return env.reward is not None or listed or (env.rewards is None and env.name in _OWN_TASKS)


def _compares_in_groups(config: Any) -> bool:
    return _is_own(config) or (config.grpo.scale or PRESETS[config.algo].advantage["scale"]) != "raw"


def _is_own(config: Any) -> bool:
    """True for an algorithm with a loss of its own; the plan names the settings that it does not read."""
    return config.algorithm is not None or config.COMMAND != "grpo"


def _loss(config: Any) -> Any:
    return config.grpo.over(PRESETS[config.algo].settings)


_MEASURED = "problems that are not trained on: eval.dataset=FILE, or an env with a split for them"
_ROWS = "rows that are not trained on: eval.dataset=FILE, or an env with problems"
_IN_ROLLOUTS = "rollouts: it is read by llmrl grpo alone"
_TOOLS = "env.tools"
# setting -> (True if it has an effect, what that needs)
_NEEDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eval.every": (_is_measured, _ROWS),
    "eval.rows": (_is_measured, _ROWS),
    "eval.split": (lambda config: _is_measured(config) and not _is_file(config.eval.dataset), "a dataset with splits"),
    "eval.batch_size": (_generates, _MEASURED),
    "eval.max_tokens": (_generates, _MEASURED),
    "stop.split": (lambda config: not _is_file(config.eval.dataset), "a dataset with splits"),
    "data.split": (_has_splits("path", "data"), "data.path with splits: a folder or a hub name"),
    "data.name": (lambda config: _is_named(config.data.path), "a hub name in data.path"),
    "data.margin_column": (lambda config: hasattr(config, "reward"), "llmrl reward"),
    "env.split": (
        lambda config: _rolls_out(config) and not _is_file(config.env.dataset),
        "rollouts on data with splits",
    ),
    "env.config": (
        lambda config: config.env.name not in _OWN_TASKS and not _is_file(config.env.dataset),
        "a hub name in env.dataset",
    ),
    "env.max_prompt_tokens": (_rolls_out, _IN_ROLLOUTS),
    "env.too_long": (_rolls_out, _IN_ROLLOUTS),
    "env.max_conversation_tokens": (_rolls_out, _IN_ROLLOUTS),
    "env.on_rewrite": (
        lambda config: _rolls_out(config) and config.env.max_turns > 1,
        "rollouts of several turns: env.max_turns",
    ),
    "env.tool_format": (lambda config: config.env.tools, _TOOLS),
    "env.tool_timeout_s": (lambda config: config.env.tools, _TOOLS),
    "env.declare_tools": (lambda config: config.env.tools, _TOOLS),
    "env.reward_deadline_s": (_runs_functions, "a function as a reward: env.reward, or fn in env.rewards"),
    "refill_rounds": (lambda config: config.zero_variance == "refill", "zero_variance=refill"),
    "min_spread": (
        lambda config: _compares_in_groups(config) and config.zero_variance != "keep",
        "groups that are left out for equal rewards: zero_variance=drop or refill",
    ),
    "zero_variance": (_compares_in_groups, "an advantage within groups: not grpo.scale=raw"),
    "grpo.observation": (lambda config: config.env.max_turns > 1, "observations: env.max_turns above 1"),
    "grpo.clip": (
        lambda config: _is_own(config) or _loss(config).surrogate not in ("reinforce", "sapo"),
        "a surrogate that clips: clip, cispo or dppo",
    ),
    "grpo.kl_estimator": (
        lambda config: _is_own(config) or _loss(config).kl or _loss(config).kl_inference,
        "grpo.kl or grpo.kl_inference",
    ),
    "rollout.probe_factor": (lambda config: config.rollout.engine == "vllm", "rollout.engine=vllm"),
}


def settings_without_effect(config: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The path of each setting whose value is not the default and has no effect, and a sentence that says why."""
    yield from _without_effect(config, _NEEDS)
    of_env = {name: need for name, need in _NEEDS.items() if name.startswith("env.")}
    for number, source in enumerate(getattr(getattr(config, "env", None), "mix", None) or ()):
        one = config.model_copy(update={"env": source})
        for (section, leaf), sentence in _without_effect(one, of_env):
            if leaf not in SHARED_BY_SOURCES:
                yield (section, "mix", number, leaf), sentence
    for name, own in (config.eval.sets or {}).items() if hasattr(config, "eval") else ():
        for (_, leaf), sentence in _without_effect(config.model_copy(update={"env": own}), of_env):
            if leaf not in SHARED_BY_SOURCES and (leaf != "split" or _is_file(own.dataset)):
                yield ("eval", "sets", name, leaf), sentence


def _without_effect(
    config: Any, needs: dict[str, tuple[Callable[[Any], bool], str]]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for name, (has_effect, needed) in needs.items():
        *sections, leaf = path = tuple(name.split("."))
        holder = config
        for section in sections:
            holder = getattr(holder, section, None)
        fields = {} if holder is None else type(holder).model_fields
        if leaf not in fields or getattr(holder, leaf) == fields[leaf].get_default(call_default_factory=True):
            continue
        if not has_effect(config):
            yield path, f"needs {needed}; it has no effect: got {getattr(holder, leaf)!r}; set that, or leave it out"
