"""Losses. The language-model ones are in `llmrl.objectives.llm`; every loss is a `LossModule`."""

from __future__ import annotations

from llmrl.objectives.base import LossModule, merge_outputs, total_loss

__all__ = ["LossModule", "merge_outputs", "total_loss"]
