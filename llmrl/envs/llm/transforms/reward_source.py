"""Reward functions as users give them: found by name, and asked which columns of the data they want."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrl.errors import ConfigError
from llmrl.loading import load_function

__all__ = ["Parameters", "Reward", "load_reward", "runs_apart"]

Reward = Callable[..., Any]


def load_reward(name: str) -> Reward:
    """The function that ``"package.module:function"`` names. Modules of the working directory are found.

    Raises  ConfigError where the name has another form, the module cannot be imported, or it has no such function

    >>> load_reward("math:isfinite")(1.0)
    True
    """
    return load_function(name, what="reward")


def runs_apart(fn: Reward | str, process: bool | None) -> str | None:
    """The name by which another process is to load the function; None where it runs in this one.

    Raises  ConfigError where ``process`` asks for another and the function cannot be imported by a name
    """
    if isinstance(fn, str):
        own = fn.partition(":")[0].partition(".")[0] == "llmrl"
        return fn if process or (process is None and not own) else None
    if not process:
        return None
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module or ""), name, None) is not fn:
        raise ConfigError(
            f"RewardFunction: with process=True the reward must be importable by name, as my_pkg.rewards:exact: got "
            f"{getattr(fn, '__name__', type(fn).__name__)!r} of module {module!r}."
        )
    return f"{module}:{name}"


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
