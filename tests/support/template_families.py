"""The documented text of every built-in chat template, for one conversation and one tool call."""
# ruff: noqa: RUF001 (DeepSeek writes its markers with full-width bars)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmrl.data.llm import History
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer

SYSTEM, USER, ANSWER, MORE, LAST = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12+30?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "And 7 times 6, é?"},
    {"role": "assistant", "content": "42, again.\n\nReally."},
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42"}
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
    "<|end|>"
)


@dataclass(frozen=True)
class Family:
    """What a family's documentation says of the conversation above, and what its format cannot say.

    text      system message, question, answer, question, answer
    prompt    what the generation prompt adds after a question
    answers   what the assistant wrote in ``text``, each end of turn included
    calls     a question, a tool call, the tool's answer, an answer; None: the format has no tool turns
    """

    text: str
    prompt: str
    answers: tuple[str, str]
    calls: str | None = None
    has_system: bool = True


def chatml(last: str) -> str:
    return (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n"
        "It is 42.<|im_end|>\n<|im_start|>user\nAnd 7 times 6, é?<|im_end|>\n<|im_start|>assistant\n"
        f"{last}<|im_end|>\n"
    )


QWEN_CALLS = (
    "<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nANSWER<|im_end|>\n"
)
FAMILIES = {
    "chatml_format": Family(
        chatml("42, again.\n\nReally."),
        "<|im_start|>assistant\n",
        ("It is 42.<|im_end|>", "42, again.\n\nReally.<|im_end|>"),
    ),
    "qwen": Family(
        chatml("42, again.\n\nReally."),
        "<|im_start|>assistant\n",
        ("It is 42.<|im_end|>", "42, again.\n\nReally.<|im_end|>"),
        QWEN_CALLS.replace("ANSWER", "It is 42."),
    ),
    "qwen3": Family(
        chatml("<think>\n\n</think>\n\n42, again.\n\nReally."),
        "<|im_start|>assistant\n",
        ("It is 42.<|im_end|>", "<think>\n\n</think>\n\n42, again.\n\nReally.<|im_end|>"),
        QWEN_CALLS.replace("ANSWER", "<think>\n\n</think>\n\nIt is 42."),
    ),
    "llama": Family(
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 12+30? [/INST] It is 42. </s>"
        "<s>[INST] And 7 times 6, é? [/INST] 42, again.\n\nReally. </s>",
        "",
        (" It is 42. </s>", " 42, again.\n\nReally. </s>"),
    ),
    "llama3": Family(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 12+30?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 42.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 7 times 6, é?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n42, again.\n\nReally.<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("It is 42.<|eot_id|>", "42, again.\n\nReally.<|eot_id|>"),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 12+30?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 12, "b": 30}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 42.<|eot_id|>",
    ),
    "mistral": Family(
        "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] What is 12+30?[/INST] It is 42.</s>"
        "[INST] And 7 times 6, é?[/INST] 42, again.\n\nReally.</s>",
        "",
        (" It is 42.</s>", " 42, again.\n\nReally.</s>"),
    ),
    "gemma": Family(
        "<bos><start_of_turn>user\nWhat is 12+30?<end_of_turn>\n<start_of_turn>model\nIt is 42.<end_of_turn>\n"
        "<start_of_turn>user\nAnd 7 times 6, é?<end_of_turn>\n"
        "<start_of_turn>model\n42, again.\n\nReally.<end_of_turn>\n",
        "<start_of_turn>model\n",
        ("It is 42.<end_of_turn>", "42, again.\n\nReally.<end_of_turn>"),
        has_system=False,
    ),
    "phi": Family(
        "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is 12+30?<|end|>\n<|assistant|>\nIt is 42.<|end|>\n"
        "<|user|>\nAnd 7 times 6, é?<|end|>\n<|assistant|>\n42, again.\n\nReally.<|end|>\n",
        "<|assistant|>\n",
        ("It is 42.<|end|>", "42, again.\n\nReally.<|end|>"),
    ),
    "deepseek": Family(
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>What is 12+30?<｜Assistant｜>It is 42.<｜end▁of▁sentence｜>"
        "<｜User｜>And 7 times 6, é?<｜Assistant｜>42, again.\n\nReally.<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
        ("It is 42.<｜end▁of▁sentence｜>", "42, again.\n\nReally.<｜end▁of▁sentence｜>"),
        "<｜begin▁of▁sentence｜><｜User｜>What is 12+30?<｜Assistant｜>"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 12, "b": 30}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "It is 42.<｜end▁of▁sentence｜>",
    ),
    "falcon": Family(
        "<|system|>\nBe brief.\n<|user|>\nWhat is 12+30?\n<|assistant|>\nIt is 42.<|endoftext|>\n"
        "<|user|>\nAnd 7 times 6, é?\n<|assistant|>\n42, again.\n\nReally.<|endoftext|>",
        "<|assistant|>\n",
        ("It is 42.<|endoftext|>", "42, again.\n\nReally.<|endoftext|>"),
    ),
    "dialogpt": Family(
        "What is 12+30?<|endoftext|>It is 42.<|endoftext|>And 7 times 6, é?<|endoftext|>"
        "42, again.\n\nReally.<|endoftext|>",
        "",
        ("It is 42.<|endoftext|>", "42, again.\n\nReally.<|endoftext|>"),
        has_system=False,
    ),
    "gpt_oss": Family(
        HARMONY + "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>What is 12+30?<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|end|>"
        "<|start|>user<|message|>And 7 times 6, é?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>42, again.\n\nReally.<|return|>",
        "<|start|>assistant",
        # Where an answer is past, the format has put another marker in the place of the end that was written.
        ("<|channel|>final<|message|>It is 42.", "<|channel|>final<|message|>42, again.\n\nReally.<|return|>"),
        HARMONY + "<|start|>user<|message|>What is 12+30?<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 12, "b": 30}<|call|>'
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>42<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 42.<|return|>",
    ),
}
NAMES = list(FAMILIES)
WITH_CALLS = [name for name in NAMES if FAMILIES[name].calls]


def conversation(name: str) -> list[dict[str, Any]]:
    return [*([SYSTEM] if FAMILIES[name].has_system else []), USER, ANSWER, MORE, LAST]


def family(name: str) -> Renderer:
    return Renderer(tiny_tokenizer(template=name))


def written(name: str, chat: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": False} | options
    return History.from_messages(chat).apply_chat_template(chat_template_name=name, **options)


def trained(renderer: Renderer, chat: list[dict[str, Any]]) -> tuple[str, ...]:
    [row] = renderer.render([chat])
    inside = torch.zeros_like(row.assistant_mask)
    for start, end in row.spans:
        inside[start:end] = True
    assert torch.equal(inside, row.assistant_mask)
    return tuple(renderer.tokenizer.decode(row.ids[start:end]) for start, end in row.spans)
