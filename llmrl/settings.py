"""Base class of settings sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_LARGEST = 10**9  # of a number: beyond it, deadlines and sizes overflow, and rates give weights that are not finite


class Settings(BaseModel):
    """A section of a recipe: immutable; unknown names and numbers beyond any use are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        limit = 2**63 - 1 if info.field_name == "seed" else _LARGEST
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and abs(number) > limit:
                raise ValueError(f"must be at most {limit:.0f}: got {number!r}")
        return value
