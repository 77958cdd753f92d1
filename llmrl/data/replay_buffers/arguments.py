"""Keywords of constructors: a misspelt one is answered with the name that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from llmrl.errors import did_you_mean

Init = TypeVar("Init", bound=Callable[..., None])


def near_names(init: Init) -> Init:
    """For the constructor at the end of a chain, which gets every keyword that the others do not know.

    Raises: TypeError for one that it does not know either, with the nearest of those that the chain has.
    """
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in own:
                who = type(self)
                raise TypeError(
                    f"{who.__name__}: an argument must be one that it has: got {name!r}."
                    f"{did_you_mean(name, _known(who))}"
                )
        init(self, *arguments, **keywords)

    return checked  # type: ignore[return-value]


def _known(cls: type) -> Iterator[str]:
    """The names of the arguments of a class, up to the constructor that hands nothing on."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            _, *arguments = inspect.signature(base.__init__).parameters.values()
            yield from (each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
            if not any(each.kind is each.VAR_KEYWORD for each in arguments):
                return
