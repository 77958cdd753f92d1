"""Parsers of rendered conversations, text -> messages, for people and tools: training never reads ids from text.

The last message of a text carries ``"is_complete": False`` if the marker that ends it is missing.
"""

from __future__ import annotations

from llmrl.data.llm.parsers.chatml import parse_chatml, parse_qwen3
from llmrl.data.llm.parsers.deepseek import DEEPSEEK_TOKENS, parse_deepseek
from llmrl.data.llm.parsers.gpt_oss import parse_gpt_oss, read_gpt_oss_answer, thought_key
from llmrl.data.llm.parsers.turns import (
    parse_dialogpt,
    parse_falcon,
    parse_gemma,
    parse_llama,
    parse_llama3,
    parse_mistral,
    parse_phi,
)

__all__ = [
    "DEEPSEEK_TOKENS",
    "parse_chatml",
    "parse_deepseek",
    "parse_dialogpt",
    "parse_falcon",
    "parse_gemma",
    "parse_gpt_oss",
    "parse_llama",
    "parse_llama3",
    "parse_mistral",
    "parse_phi",
    "parse_qwen3",
    "read_gpt_oss_answer",
    "thought_key",
]
