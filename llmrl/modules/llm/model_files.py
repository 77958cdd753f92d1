"""Loads a model's files from a folder or the hub; reports any fault as one kind of error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from llmrl.errors import DataError

T = TypeVar("T")


def loaded(load: Callable[..., T], source: str, *, setting: str = "model", **options: Any) -> T:
    """Returns ``load(source, **options)``, without a progress bar and without running code from the model's repository.

    Raises  DataError that names the ``setting`` and the source, for any exception of ``load``
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of the weights: it would break up the run's own console output
    try:
        return load(source, trust_remote_code=False, **options)  # None would prompt on a terminal
    except Exception as error:  # each library that reads the files has its own errors
        raise DataError(f"{setting} {source}: cannot be loaded: {error or type(error).__name__}") from error


def check_letters(tokenizer: Any, source: object) -> None:
    """Raises DataError for a tokenizer without ids for letters, which Transformers makes of a folder without files."""
    letters = tokenizer("hello world", add_special_tokens=False)["input_ids"]
    if not set(letters) - {tokenizer.unk_token_id}:
        raise DataError(
            f"model {source}: its tokenizer must have ids for text: got none for 'hello world', and {len(tokenizer)} "
            "entries in all; usually tokenizer.json is missing: copy or download the folder again."
        )


def check_whole(missing: Iterable[str]) -> None:
    """Raises ValueError if weights are missing: Transformers only warns, and initialises them at random."""
    if missing := sorted(missing):
        raise ValueError(f"{len(missing)} of its weights are in none of its files, such as {', '.join(missing[:3])}")
