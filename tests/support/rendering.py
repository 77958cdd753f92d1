"""Conversations and families of chat templates for the tests of rendering."""

from __future__ import annotations

from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer

USER_1, USER_2, USER_3 = (
    {"role": "user", "content": "What is 12+30?"},
    {"role": "user", "content": "And 7 times 6?"},
    {"role": "user", "content": "Thanks, é ✓!"},
)
ANSWER_1, ANSWER_2 = (
    {"role": "assistant", "content": "It is 42."},
    {"role": "assistant", "content": "42, again.\n\nReally."},
)
CHAT = [USER_1, ANSWER_1, USER_2, ANSWER_2]

# Formats of well-known families, without generation blocks: (template, tokens to add, end of turn)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "own": (None, [], "<|im_end|>"),
    "chatml_format": ("chatml_format", [], "<|im_end|>"),
    "llama": (LLAMA, ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"], "<|eot_id|>"),
    "mistral": (MISTRAL, ["</s>", "<s>"], "</s>"),
    "gemma": (GEMMA, ["<end_of_turn>", "<start_of_turn>", "<bos>"], "<end_of_turn>"),
    "phi": (PHI, ["<|end|>", "<|user|>", "<|assistant|>"], "<|end|>"),
}


def family(name: str) -> Renderer:
    template, tokens, end = FAMILIES[name]
    tokenizer = tiny_tokenizer()
    eos = "<|endoftext|>" if name == "phi" else end
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens], "eos_token": eos})
    if name in ("llama", "mistral", "gemma"):
        tokenizer.add_special_tokens({"bos_token": tokens[-1]})
    if name == "chatml_format":
        return Renderer(tokenizer, chat_template_name=name)
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(tokenizer)


def decoded_spans(renderer: Renderer, chat: list[dict]) -> list[str]:
    [row] = renderer.render([chat])
    return [renderer.tokenizer.decode(row.ids[start:end]) for start, end in row.spans]


def reference_ids(renderer: Renderer, chat: list[dict], **kwargs) -> list[int]:
    return renderer.tokenizer.apply_chat_template(chat, chat_template=renderer.template.jinja, **kwargs)["input_ids"]
