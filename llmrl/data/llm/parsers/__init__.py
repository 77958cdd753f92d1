"""Readers of rendered conversations, one file per text format: text -> messages."""

from __future__ import annotations

from llmrl.data.llm.parsers.chatml import parse_chatml
from llmrl.data.llm.parsers.deepseek import DEEPSEEK_TOKENS, parse_deepseek
from llmrl.data.llm.parsers.dialogpt import parse_dialogpt
from llmrl.data.llm.parsers.falcon import parse_falcon
from llmrl.data.llm.parsers.gemma import parse_gemma
from llmrl.data.llm.parsers.gpt_oss import parse_gpt_oss, read_gpt_oss_answer, thought_key
from llmrl.data.llm.parsers.llama import parse_llama
from llmrl.data.llm.parsers.llama3 import parse_llama3
from llmrl.data.llm.parsers.mistral import parse_mistral
from llmrl.data.llm.parsers.phi import parse_phi
from llmrl.data.llm.parsers.qwen3 import parse_qwen3

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
