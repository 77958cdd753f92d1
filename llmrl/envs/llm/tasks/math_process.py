"""Compares two mathematical answers in a separate process.

`MathEquality` starts this file as a script, which imports math-verify but not torch. Algebra on a model's answer may
take any time and memory: the memory is limited here, and the process can be killed.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from typing import Any

from llmrl.concurrency.worker_process import serve
from llmrl.optional import require


def main() -> None:
    memory_mb = int(sys.argv[1])
    math_verify = require("math_verify", extra="math", used_by="MathEquality")
    logging.disable(logging.CRITICAL)  # math-verify logs that its own timeouts, which need signals, are off
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    forms = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        marked = any(mark in text for mark in ("$", "\\(", "\\["))  # a sentence with mathematics in it
        return math_verify.parse(text if marked else f"\\boxed{{{text}}}", forms, parsing_timeout=None)

    def compare(pair: tuple[str, str], reply: Callable[[bool], None]) -> None:
        reference, answer = pair
        try:
            verdict = bool(math_verify.verify(read(reference), read(answer), timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):  # the answer may not be valid mathematics
            verdict = False
        reply(verdict)

    serve(compare)


if __name__ == "__main__":
    main()
