"""Reward functions as users give them: found by name, and asked which columns of the data they want."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrl.errors import ConfigError, near

__all__ = ["Parameters", "Reward", "load_reward"]

Reward = Callable[..., Any]


def load_reward(name: str, *, what: str = "reward") -> Reward:
    """The function that ``"package.module:function"`` names; ``what`` it is to be, for the messages.

    Modules of the working directory are found.

    Raises  ConfigError where the name has another form, the module cannot be imported, or it has no such function

    >>> load_reward("math:isfinite")(1.0)
    True
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{what}: must be 'package.module:function': got {name!r}.")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a console script does not look there
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module: whatever it raises, the setting cannot be run
        raise ConfigError(
            f"{what}: {module_name!r} must be importable from here: importing it raises {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(
            f"{what}: {module_name!r} has no function {attribute!r}: it has {', '.join(known) or 'none'}."
            f"{near(attribute, known)}"
        )
    fn = getattr(module, attribute)
    if not callable(fn):
        raise ConfigError(f"{what}: {name!r} must be a function: it is a {type(fn).__name__}.")
    return fn


@dataclass(frozen=True)
class Parameters:
    """What a reward function asks for beside the completion."""

    answer: bool
    required: list[str]
    optional: list[str]
    takes_all: bool

    @classmethod
    def of(cls, fn: Reward, name: str) -> Parameters:
        """By the signature. Raises ConfigError for one that cannot be called with a completion and columns by name."""
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # some builtins have no signature
            return cls(answer=True, required=[], optional=[], takes_all=False)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes_any = parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        if not parameters or not (takes_any or parameters[0].kind in positional):
            raise ConfigError(
                f"RewardFunction {name!r}: its first parameter must take the completion by position, as in "
                f"def {name}(completion, answer): its signature is {name}{inspect.signature(fn)}."
            )
        required, optional, takes_all = [], [], False
        for parameter in parameters[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                takes_all = True
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"RewardFunction {name!r}: the parameters after the first are passed by name, but "
                    f"{parameter.name!r} takes no name; its signature is {name}{inspect.signature(fn)}."
                )
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL and parameter.name != "answer":
                (required if parameter.default is inspect.Parameter.empty else optional).append(parameter.name)
        answer = takes_all or any(parameter.name == "answer" for parameter in parameters[1:])
        return cls(answer, required, optional, takes_all)
