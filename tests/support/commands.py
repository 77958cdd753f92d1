"""What a command of llmrl left, compared with what was expected of it; several commands by one start of the ranks."""

from __future__ import annotations

import os
import shlex
import sys
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


def run_each(lines: Sequence[str]) -> None:
    """Runs command lines one after another in this process, a rank of them all; each is a start of its own."""
    from llmrl.commands.cli import main

    launch = os.environ["TORCHELASTIC_RUN_ID"]
    for number, line in enumerate(lines):
        os.environ |= {"TORCHELASTIC_RUN_ID": f"{launch}-{number}", "TORCHELASTIC_RESTART_COUNT": str(number)}
        if code := main(shlex.split(line)):
            sys.exit(code)


if __name__ == "__main__":
    run_each(sys.argv[1:])
