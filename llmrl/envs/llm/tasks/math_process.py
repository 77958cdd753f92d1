"""Compares two mathematical answers in a process of its own.

Started by `MathEquality` as a script, so that it imports math-verify and not torch. Algebra on a model's answer may
take any time and memory: here both are limited, and the process can be killed.
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
        except (Exception, RecursionError, MemoryError):  # a model's answer is not always mathematics
            verdict = False
        reply(verdict)

    serve(compare)


if __name__ == "__main__":
    main()
