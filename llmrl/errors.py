"""The errors of llmrl, and the spelling suggestions in their messages.

Every class also derives from the standard-library error that it refines: ``except ValueError`` catches a ConfigError.
A message reads *who: what must hold: got X, expected Y; what to do*. A new class must be constructible from its message
alone, because Ray and multiprocessing pickle errors to send them between processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "LLMRLError",
    "MissingDependencyError",
    "MissingKeyError",
    "RewriteError",
    "RolloutError",
    "RunFolderError",
    "ShapeError",
    "SpecIndexError",
    "TemplateError",
    "TrainingError",
    "UnsupportedError",
    "WeightSyncError",
    "WorkerError",
    "caused_by",
    "check_at_least",
    "check_choice",
    "closest",
    "did_you_mean",
]


class LLMRLError(Exception):
    """Base class of the errors that llmrl raises on purpose."""


class ConfigError(LLMRLError, ValueError):
    """A setting is unknown, has a value that cannot be used, or contradicts another one."""


class DataError(LLMRLError, ValueError):
    """A dataset, a column, a row or a checkpoint cannot be read, or cannot be trained on."""


class TemplateError(LLMRLError, ValueError):
    """A chat template is missing, or breaks a rule that training depends on."""


class RewriteError(TemplateError, ValueError):
    """A chat template renders earlier messages differently once others follow: the token stream cannot continue."""


class ShapeError(LLMRLError, ValueError):
    """Tensors have incompatible shapes."""


class SpecIndexError(ShapeError, IndexError):
    """An index into a spec is out of range, or of a kind that tensors do not support."""


class MissingKeyError(LLMRLError, KeyError):
    """An entry that the reader needs is not in the TensorDict.

    >>> print(MissingKeyError("GRPOLoss: 'advantage' is not in the batch; keys present: tokens, masks."))
    GRPOLoss: 'advantage' is not in the batch; keys present: tokens, masks.
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError shows repr(message), which quotes and escapes a sentence


class MissingDependencyError(LLMRLError, ImportError):
    """An optional package is used but not installed."""


class WeightSyncError(LLMRLError, RuntimeError):
    """New weights did not reach every receiver, or arrived incomplete or with a wrong version."""


class RolloutError(LLMRLError, RuntimeError):
    """A conversation could not be finished: a tool, a reward or an engine failed. Not the same as a reward of 0."""


class TrainingError(LLMRLError, ArithmeticError):
    """A loss or a gradient is NaN or infinite; the weights were not updated."""


class DeadlineError(LLMRLError, TimeoutError):
    """A wait ran past its deadline; the message names what was waited for."""


class WorkerError(LLMRLError, ConnectionError):
    """A worker process has ended or cannot be reached; the message names it."""


class UnsupportedError(LLMRLError, NotImplementedError):
    """A backend does not support this operation; the message names an alternative."""


class RunFolderError(LLMRLError, OSError):
    """A run's folder cannot be created or written, is gone, or belongs to another running process."""


class CheckpointError(LLMRLError, RuntimeError):
    """A checkpoint could not be written, or does not fit the run; the previous one is untouched."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that ``name`` most likely meant, or None if no name is close.

    >>> closest("learning_rat", ["lr", "learning_rate", "warmup"])
    'learning_rate'
    """
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: a suggestion, or "" if no known name is close.

    >>> did_you_mean("rewrad", ["reward", "done"])
    " Did you mean 'reward'?"
    >>> did_you_mean("xyz", ["reward", "done"])
    ''
    """
    match = closest(name, known)
    return f" Did you mean {match!r}?" if match else ""


def caused_by(sentence: str, failure: str) -> RolloutError:
    """An error whose message ends with what ``failure`` says, which is a line or a traceback; a traceback is its note.

    >>> print(caused_by("the env failed for 4 of 4", "ZeroDivisionError: division by zero"))
    the env failed for 4 of 4: ZeroDivisionError: division by zero
    """
    lines = failure.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    error = RolloutError(f"{sentence}: {lines[frames[-1] + 1 if frames and frames[-1] + 1 < len(lines) else -1]}")
    if frames:
        error.add_note(failure.strip())
    return error


def check_choice(who: str, name: str, value: object, known: Iterable[object]) -> None:
    """Raises ConfigError, suggesting a similar name, if the value of a setting is not a known one."""
    if value not in (known := list(known)):
        names = list(map(str, known))
        hint = did_you_mean(str(value), names)
        raise ConfigError(f"{who}: {name} must be one of {', '.join(names)}: got {value!r}.{hint}")


def check_at_least(who: str, least: int, **settings: float | None) -> None:
    """Raises ConfigError for a setting below ``least``; None means that it has no value."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise ConfigError(f"{who}: {name} must be at least {least}: got {value!r}.")
