"""Environments by ``env.name``: an embedded task, a public one, the user's rows, or a user-defined environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrl.data.llm.dataset_files import FILE_FORMATS, load_rows
from llmrl.endpoint.verifiers import verifiers_rows
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.options import keywords_of
from llmrl.envs.llm.tasks.countdown import CountdownEnv
from llmrl.envs.llm.tasks.embedded import EMBEDDED_TASKS
from llmrl.envs.llm.tasks.episodes import EpisodeEnv
from llmrl.envs.llm.tasks.gsm8k import GSM8KEnv
from llmrl.envs.llm.tasks.ifeval import IFEvalEnv
from llmrl.envs.llm.tasks.math import MATHEnv
from llmrl.envs.llm.tasks.openenv import OpenEnvEnv
from llmrl.envs.llm.tasks.reasoning_gym import ReasoningGymEnv
from llmrl.envs.llm.tasks.task import TaskEnv
from llmrl.envs.llm.tasks.text_env import GEMEnv, TextArenaEnv, TextEnv
from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object
from llmrl.train.settings.types import VERIFIERS

Row = Mapping[str, Any]

_PUBLIC: dict[str, type[TaskEnv]] = {"gsm8k": GSM8KEnv, "math": MATHEnv, "countdown": CountdownEnv, "ifeval": IFEvalEnv}
_PUBLIC |= {"reasoning_gym": ReasoningGymEnv, "openenv": OpenEnvEnv}
_PUBLIC |= {each.NAME: each for each in (TextEnv, GEMEnv, TextArenaEnv)}
# Keywords that a recipe passes to an environment.
_FROM_RECIPE = ("dataset", "system_prompt", "max_steps", "shuffle", "num_envs", "repeats", "group_repeats", "seed")
_FROM_RECIPE += ("rank", "world_size")


def env_maker(name: str) -> Callable[..., DatasetChatEnv]:
    """The class of an environment, or a function of the user's that returns one.

    Raises  ConfigError if a user-defined name cannot be loaded, or is neither of the two
    """
    if ":" not in name:
        return _PUBLIC.get(name, DatasetChatEnv)
    made = load_object(name, what="environment")
    is_class = inspect.isclass(made)
    if not (issubclass(made, DatasetChatEnv) if is_class else callable(made)):
        kind = f"a subclass of {made.__mro__[1].__name__}" if is_class else f"of type {type(made).__name__}"
        raise ConfigError(
            f"environment: {name!r} must be a subclass of TaskEnv or DatasetChatEnv (llmrl.envs.llm), or a function "
            f"that returns one: it is {kind}."
        )
    return made


def is_task(maker: Callable[..., DatasetChatEnv]) -> bool:
    """True for a `TaskEnv`, whose class methods give its rows and its reward without an environment."""
    return inspect.isclass(maker) and issubclass(maker, TaskEnv)


def has_episodes(maker: Callable[..., DatasetChatEnv]) -> bool:
    """True for an `EpisodeEnv`, whose prompts are known when its conversations begin."""
    return inspect.isclass(maker) and issubclass(maker, EpisodeEnv)


def check_env(name: str, options: Mapping[str, Any], *, has_dataset: bool, has_reward: bool) -> None:
    """Checks that a recipe can make an environment that takes options, without making it.

    options      keyword arguments from ``env.options``
    has_dataset  the settings give rows; ``has_reward``: the settings give a reward
    Raises       ConfigError for a missing method, parameter, or rows
    """
    maker = env_maker(name)
    own = name.rpartition(":")[2]
    has_own_reward = (
        not is_task(maker) or hasattr(maker, "SCORER") or maker.scorer.__func__ is not TaskEnv.scorer.__func__
    )
    if not has_reward and not has_own_reward:
        raise ConfigError(f"environment: {own} must have a SCORER or define scorer, or the settings env.reward.")
    has_own_rows = is_task(maker) and maker.rows.__func__ is not TaskEnv.rows.__func__
    if not has_dataset and getattr(maker, "DATASET", None) is None and not has_own_rows:
        raise ConfigError(
            f"environment: {own} has no rows of its own: set env.dataset"
            + (", or give the class a DATASET." if is_task(maker) else "; only a TaskEnv can do without it.")
        )
    if taken := sorted(set(options) & {*_FROM_RECIPE, "compute_reward"}):
        raise ConfigError(f"environment: env.options must not have {', '.join(taken)}: the recipe passes that itself.")
    signature = inspect.signature(maker)
    expected = (*_FROM_RECIPE, *(["compute_reward"] if is_task(maker) else []))
    known, takes_all = _keywords(maker)
    if not takes_all:
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"environment: env.options: {own} has no parameter {option!r}.{did_you_mean(option, known)}"
                )
        if lacking := [parameter for parameter in expected if parameter not in known]:
            raise ConfigError(
                f"environment: {own} must take what a recipe passes, {', '.join(expected)}: {', '.join(lacking)} "
                f"{'is' if len(lacking) == 1 else 'are'} missing; take **options and pass them to DatasetChatEnv."
            )
    try:
        signature.bind(**dict.fromkeys((*expected, *options)))
    except TypeError as error:
        raise ConfigError(f"environment: {own}{signature}: {error}; give it in env.options.") from None


def env_rows(
    name: str, dataset: str | None, *, split: str, config: str | None, options: Mapping[str, Any] | None = None
) -> Sequence[Row]:
    """The rows of an environment, or of ``dataset`` in their place. Raises DataError for data that cannot be read.

    A task's ``rows`` gets those of its ``options`` that it has parameters for.
    """
    if name == VERIFIERS:
        if dataset is not None:
            raise ConfigError(
                "eval.dataset: verifiers has tasks of its own: choose what is measured by env.options.eval."
            )
        return verifiers_rows(options or {}, split=split)
    maker = env_maker(name)
    if is_task(maker):
        return maker.rows(dataset, name=config, split=split, **keywords_of(maker.rows, options or {}))
    if dataset is None:
        return EMBEDDED_TASKS[name].problems(split)
    return load_rows(dataset, split=split, name=config)


def is_file(dataset: str | None) -> bool:
    """True for a local file, which has only one split."""
    return dataset is not None and (Path(dataset).suffix.lower() in FILE_FORMATS or Path(dataset).expanduser().exists())


def _keywords(maker: Callable[..., DatasetChatEnv]) -> tuple[list[str], bool]:
    """The keyword parameters, with those of base classes that ``**options`` reach; True if others are accepted too."""
    # A signature with **options does not show the names that it passes on: read the constructors of base classes too.
    known: list[str] = []
    calls = [base.__init__ for base in maker.__mro__ if "__init__" in vars(base)] if inspect.isclass(maker) else [maker]
    if has_episodes(maker):  # these get its options
        known += [name for call in (maker.rows, maker.turns) for name in inspect.signature(call).parameters]
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        known += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return known, False
    return known, True
