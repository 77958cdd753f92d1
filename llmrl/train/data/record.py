"""The record of the data in a checkpoint: their number and a digest, with which a resumed run compares its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmrl.errors import DataError


@dataclass(frozen=True)
class DataRecord:
    """The record of ``rows`` rows: a part of a checkpoint.

    ``source``, ``unit``  names of the data and of a row in messages
    """

    source: str
    unit: str
    rows: int
    digest: str

    @classmethod
    def of(cls, source: str, unit: str, rows: int, values: Iterable[Any]) -> DataRecord:
        """The record with a digest of ``values``: columns by name, text, numbers, bytes, tensors, images and lists."""
        digest = hashlib.sha256()
        for value in values:
            add_to_digest(digest, value)
        return cls(source, unit, rows, digest.hexdigest())

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises  DataError if these are not the rows of the state; TypeError for a state of another form"""
        rows, digest = state.get("rows"), state.get("digest")
        if type(rows) is not int or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise TypeError(f"it must have rows and their digest, 64 hexadecimal digits: got {state!r:.120}")
        if (rows, digest) != (self.rows, self.digest):
            change = "other contents, or another order" if rows == self.rows else f"{self.rows}"
            raise DataError(
                f"{self.source}: a run goes on with the data that it began with: it had {rows} {self.unit}, "
                f"now there are {change}; put the file back, or start a new run from this one (model=RUN)."
            )


def add_to_digest(digest: Any, value: Any) -> None:
    """Adds a value to a digest: columns by name, text, numbers, bytes, tensors, images and lists."""
    if isinstance(value, Mapping):
        digest.update(b"{")
        for name in sorted(value, key=str):
            add_to_digest(digest, str(name))
            add_to_digest(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)} ".encode())
        for item in value:
            add_to_digest(digest, item)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, Tensor):
        digest.update(value.contiguous().cpu().numpy().tobytes())
    elif hasattr(value, "tobytes"):  # an image, an array
        digest.update(value.tobytes())
    elif value is None or isinstance(value, (str, int, float)):
        digest.update(f"{value!r},".encode("utf-8", "surrogatepass"))
    else:  # its text may hold its address
        digest.update(type(value).__qualname__.encode())
