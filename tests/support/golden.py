"""Texts compared as a whole with a file of tests/golden; LLMRL_WRITE_GOLDEN=1 scripts/test writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LLMRL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"if it is meant, LLMRL_WRITE_GOLDEN=1 writes {path}"
