"""Readers of rendered conversations, one file per text format: text -> messages."""

from __future__ import annotations

from llmrl.data.llm.parsers.chatml import parse_chatml

__all__ = ["parse_chatml"]
