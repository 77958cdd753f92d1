"""Strict and loose evaluation of a response against the instructions of its prompt.

Loose evaluation forgives what models like to add: an instruction counts as followed if it is followed after leaving out
the first line, the last line or both, and the asterisks of markdown, in any combination.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmrl.envs.llm.ifeval.checks import CHECKS, NEEDS_LANGUAGE
from llmrl.errors import DataError, did_you_mean
from llmrl.optional import require

__all__ = ["Instructions", "Verdict", "evaluate"]

RELATIONS = ("less than", "at least")
_PARAMETERS = {name: list(inspect.signature(check).parameters)[1:] for name, check in CHECKS.items()}


@dataclass(frozen=True)
class Verdict:
    """Which of the instructions were followed, in their order."""

    strict: list[bool]
    loose: list[bool]


@dataclass(frozen=True)
class Instructions:
    """The instructions of one prompt: names as in `CHECKS`, and the arguments of each."""

    names: list[str]
    arguments: list[dict[str, Any]]

    @classmethod
    def of(cls, names: Sequence[str], arguments: Sequence[Mapping[str, Any] | None], where: str) -> Instructions:
        """The columns ``instruction_id_list`` and ``kwargs`` of a row, checked.

        Reads   arguments that are None or no parameter of the check are left out: Parquet files have all for all
        Raises  DataError naming ``where`` for an unknown instruction, a missing argument, an unknown relation;
                MissingDependencyError where an instruction needs langdetect and it is not installed

        >>> Instructions.of(["punctuation:no_comma"], [{"num_words": None}], "row 1").arguments
        [{}]
        """
        if isinstance(names, str) or len(names) != len(arguments):
            raise DataError(
                f"IFEval: {where} must have one entry of kwargs per instruction: got {names!r:.80} and "
                f"{len(arguments)} entries."
            )
        checked = [_arguments(name, given or {}, where) for name, given in zip(names, arguments, strict=True)]
        if NEEDS_LANGUAGE.intersection(names):
            needing = next(name for name in names if name in NEEDS_LANGUAGE)
            require("langdetect", extra="ifeval", used_by=f"IFEval: the instruction {needing!r} of {where}")
        return cls(list(names), checked)


def evaluate(response: str, instructions: Instructions) -> Verdict:
    """Which instructions the response follows. An empty response follows none.

    >>> told = Instructions.of(["startend:quotation", "punctuation:no_comma"], [{}, {}], "row 1")
    >>> evaluate('Sure:\\n"no comma"', told)
    Verdict(strict=[False, True], loose=[True, True])
    """
    if not response.strip():
        nothing = [False] * len(instructions.names)
        return Verdict(nothing, list(nothing))
    strict, loose = [], []
    for name, arguments in zip(instructions.names, instructions.arguments, strict=True):
        check = CHECKS[name]
        strict.append(check(response, **arguments))
        loose.append(strict[-1] or any(check(variant, **arguments) for variant in _variants(response)))
    return Verdict(strict, loose)


def _variants(response: str) -> Iterator[str]:
    """The response less its first line, its last line or both, with and without asterisks; neither empty nor twice."""
    lines = response.split("\n")
    parts = (response, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip())
    seen = {response}
    for part in (*parts, *(part.replace("*", "") for part in parts)):
        if part.strip() and part not in seen:
            seen.add(part)
            yield part


def _arguments(name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    if name not in CHECKS:
        raise DataError(
            f"IFEval: an instruction must be one of the {len(CHECKS)} known ones: {where} has "
            f"{name!r}.{did_you_mean(name, CHECKS)}"
        )
    arguments = {}
    for parameter in _PARAMETERS[name]:
        value = given.get(parameter)
        if value is None:
            present = [key for key, value in given.items() if value is not None]
            raise DataError(
                f"IFEval: the instruction {name!r} of {where} must have the argument {parameter!r}: it has "
                f"{', '.join(present) or 'none'}.{did_you_mean(parameter, present)}"
            )
        if parameter.endswith("relation") and value not in RELATIONS:
            raise DataError(
                f"IFEval: {parameter} of {name!r} in {where} must be 'less than' or 'at least': got {value!r}."
            )
        arguments[parameter] = value
    return arguments
