"""Loads the algorithm that a recipe names, and checks it before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_object
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm.algorithm import Algorithm
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
    _check_metrics(found.loss)
    return found, options


def _check_metrics(loss: type[LossModule]) -> None:
    fields: dict[str, str] = {}
    for field, metric in loss.metrics.items():
        if metric.name in fields:
            raise ConfigError(
                f"algorithm: {loss.__name__}.metrics: {metric.name!r} must be declared once: it is the name of "
                f"{fields[metric.name]!r} and of {field!r}."
            )
        if metric.name not in METRICS and not (metric.meaning and metric.name.count("/") == 1):
            raise ConfigError(
                f"algorithm: {loss.__name__}.metrics: {metric.name!r} must be 'family/name' with a meaning: it is not "
                "one of llmrl's own metrics."
            )
        if metric.name in METRICS and metric.meaning:
            raise ConfigError(
                f"algorithm: {loss.__name__}.metrics: {metric.name!r} is one of llmrl's own metrics, "
                f"'{METRICS[metric.name]}': leave its meaning out, or choose another name."
            )
        fields[metric.name] = field
