"""Answers in responses: finding them, bringing them into comparable form, and scoring them as a transform."""

from llmrl.envs.llm.answers.blocks import Blocks, code_block, extract_tags, find_blocks, last_boxed
from llmrl.envs.llm.answers.numbers import normalize_answer, reference_answer
from llmrl.envs.llm.answers.parser import AnswerParser

__all__ = [
    "AnswerParser",
    "Blocks",
    "code_block",
    "extract_tags",
    "find_blocks",
    "last_boxed",
    "normalize_answer",
    "reference_answer",
]
