"""What a command of llmrl left, compared with what was expected of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Result:
    """The exit code of a command, and what it wrote to its two streams."""

    code: int
    out: str
    err: str

    def check(self, code: int | None = 0, words: Sequence[str] = ()) -> Result:
        """It ended with ``code`` (None: any but 0) and wrote these ``words``, however they are folded or framed."""
        assert self.code if code is None else self.code == code, self.out + self.err
        written = " ".join(f"{self.out} {self.err}".replace("│", " ").split())
        assert [word for word in words if " ".join(word.split()) not in written] == [], self.out + self.err
        return self
