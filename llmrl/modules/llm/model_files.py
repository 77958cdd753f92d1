"""Loads a model's files from a folder or the hub, with one error for everything that can be wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from llmrl.errors import DataError

T = TypeVar("T")


def loaded(load: Callable[..., T], source: str, *, setting: str = "model", **options: Any) -> T:
    """``load(source, **options)`` without a progress bar, and without code of the model's own.

    Raises  DataError, with the name of the ``setting`` and the source, for whatever ``load`` raises
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of the weights: it would be the only line of a run that is not ours
    try:
        return load(source, trust_remote_code=False, **options)  # None would ask, on a terminal
    except Exception as error:  # of every library that reads a file there
        raise DataError(f"{setting} {source}: cannot be loaded: {error or type(error).__name__}") from error


def check_whole(missing: Iterable[str]) -> None:
    """Raises ValueError if the files lack weights: Transformers would initialise them at random, and only warn."""
    if missing := sorted(missing):
        raise ValueError(f"{len(missing)} of its weights are in none of its files, such as {', '.join(missing[:3])}")
