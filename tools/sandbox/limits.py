"""What an interpreter in a sandbox may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llmrl.errors import ConfigError, did_you_mean

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one interpreter. Time is bounded by the deadline of each call.

    >>> Limits(memory_mib=256).processes
    64
    """

    memory_mib: int = 512  # address space of one process; with disk_mib, what all together use
    cpu_s: int = 60  # processor time of one process, over all calls of a conversation
    processes: int = 64  # processes and threads
    output_kib: int = 64  # what is kept of a call's output; code that writes 256 times that is stopped
    file_mib: int = 16  # one file
    disk_mib: int = 64  # all files, 2 KiB for each one's name; these are kept in memory

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Limits: {field.name} must be a whole number of at least 1: got {value!r}.")
        if self.memory_mib < 64:
            raise ConfigError(
                f"Limits: memory_mib must be at least 64, which Python itself needs: got {self.memory_mib}."
            )

    @classmethod
    def of(cls, given: Limits | Mapping[str, int] | None) -> Limits:
        """The bounds that are given, by name or whole; the others are the defaults. Raises ConfigError."""
        if isinstance(given, cls):
            return given
        known = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise ConfigError(f"Limits: {name!r} is none of {', '.join(known)}.{did_you_mean(name, known)}")
        return cls(**(given or {}))
