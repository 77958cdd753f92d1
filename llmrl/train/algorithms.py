"""Loads the algorithm that a recipe names, and checks it before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from tensordict.utils import NestedKey

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object
from llmrl.modules.llm.policies.columns import COLUMNS, RESERVED
from llmrl.objectives.llm.algorithm import Algorithm
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.run.metrics import METRICS


def load_algorithm(named: str | Mapping[str, Any]) -> tuple[type[Algorithm], Any]:
    """The class that a recipe names, and its options.

    Raises  ConfigError for a file that cannot be imported, a class that is not an `Algorithm`, options that do not fit,
            and metrics that are declared twice or without a meaning
    """
    name, given = (named, {}) if isinstance(named, str) else next(iter(named.items()))
    found = load_object(name, what="algorithm")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm: {name!r} must be a subclass of llmrl.objectives.llm.Algorithm: got {found!r}.")
    try:
        options = found.settings(**(given or {}))
    except ValidationError as error:
        fault = error.errors()[0]
        setting, known = ".".join(map(str, fault["loc"])), found.settings.model_fields
        if fault["type"] == "extra_forbidden":
            listed = ", ".join(known) or "none"
            near = did_you_mean(setting, known)
            raise ConfigError(f"algorithm: {name} has no setting {setting!r}; its settings: {listed}.{near}") from None
        raise ConfigError(f"algorithm: {name}: {setting}: {fault['msg']}: got {fault['input']!r}.") from None
    known = ["min_group_size", "zero_variance", "min_spread", *(f"grpo.{field}" for field in GRPOSettings.model_fields)]
    if unknown := [name for name in found.without if name not in known]:
        raise ConfigError(
            f"algorithm: {found.__name__}.without: no setting {unknown[0]!r} can be left out."
            f"{did_you_mean(unknown[0], known)}"
        )
    _check_metrics(found)
    return found, options


def _check_metrics(algorithm: type[Algorithm]) -> None:
    fields: dict[str, str] = {}
    for owner in (algorithm.loss, algorithm):
        for field, metric in owner.metrics.items():
            if metric.name in fields:
                raise ConfigError(
                    f"algorithm: {owner.__name__}.metrics: {metric.name!r} must be declared once: it is the name of "
                    f"{fields[metric.name]!r} and of {field!r}."
                )
            if metric.name not in METRICS and not (metric.meaning and metric.name.count("/") == 1):
                raise ConfigError(
                    f"algorithm: {owner.__name__}.metrics: {metric.name!r} must be 'family/name' with a meaning: it is "
                    "not one of llmrl's own metrics."
                )
            if metric.name in METRICS and metric.meaning:
                raise ConfigError(
                    f"algorithm: {owner.__name__}.metrics: {metric.name!r} is one of llmrl's own metrics, "
                    f"'{METRICS[metric.name]}': leave its meaning out, or choose another name."
                )
            fields[metric.name] = field


def columns_read(algorithm: Algorithm | type[Algorithm]) -> tuple[NestedKey, ...]:
    """The columns that the algorithm and its loss read beside those of every rollout."""
    return tuple(dict.fromkeys((*algorithm.reads, *algorithm.loss.reads)))


def check_columns(algorithm: type[Algorithm], prompts: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError for a column that neither the data nor a rollout has."""
    known = {*RESERVED, *(column.key for column in COLUMNS), *(name for row in prompts for name in row)}
    for key in columns_read(algorithm):
        written = key in known or (isinstance(key, tuple) and key[0] == "next")  # by the environment, turn by turn
        if not written:
            near = did_you_mean(key, [name for name in known if isinstance(name, str)]) if isinstance(key, str) else ""
            columns = ", ".join(sorted({name for row in prompts for name in row}))
            raise ConfigError(
                f"algorithm: {algorithm.__name__} reads the column {key!r}, which must be in the data or in every "
                f"rollout: the data has {columns}.{near}"
            )
