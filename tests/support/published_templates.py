"""Chat templates of the shape that models are published with, without generation blocks but for SmolLM.

They differ from the registered ones: they let unknown roles pass, print what they are given, drop earlier thoughts,
open a thought in the prompt, and expect arguments of calls as an object or as text.
"""
# ruff: noqa: RUF001 (DeepSeek writes its markers with full-width bars)

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from llmrl.testing import _trained, tiny_tokenizer


class Published(NamedTuple):
    jinja: str
    tokens: str  # control tokens, the end of a turn last
    calls: str = ""  # how a call of get(city=...) is written, with CITY in place of the argument; "": no calls
    thinks: bool = False  # reads reasoning_content
    system: bool = True
    arguments_as_text: bool = False


_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content + '\n\n' if messages[0].role == 'system' }}# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_RESULT = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_JSON_CALL = (
    "{% for c in m.tool_calls or [] %}{% if c.function %}{% set c = c.function %}{% endif %}"
    '{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_PLAIN = (
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(answer: str, prompt: str = _PROMPT, before: str = "") -> str:
    return (
        f"{_TOOLS}{before}{{% for m in messages %}}{_PLAIN}{answer}<|im_end|>\n{_RESULT}"
        f"{{% endif %}}{{% endfor %}}{prompt}"
    )


_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
    "m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% set said, thought = m.content or '', m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
)
_OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
_QUIET = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false"
    " %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_XML_CALL = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% set c = c.function %}\n<tool_call>\n<function={{ c.name }}>"
    "{% for name, value in c.arguments | items %}\n<parameter={{ name }}>\n{{ value }}\n</parameter>{% endfor %}\n"
    "</function>\n</tool_call>{% endfor %}"
)
_LLAMA_HEAD = "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
_LLAMA = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nTools: {{ tools | tojson }}<|eot_id|>"
    "{% endif %}{% for m in messages %}{% if not (m.role == 'tool' or 'tool_calls' in m) %}HEAD{{ m.content | trim }}"
    "<|eot_id|>{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}"
    '{% endif %}HEAD{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% else %}HEAD{% if m.content is mapping or "
    "m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
).replace("HEAD", _LLAMA_HEAD)
_MISTRAL = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    "{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>{{ m.content or '' }}"
    "{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '\n```json\n' + c.function.arguments + "
    "'\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜end▁of▁sentence｜>{% elif m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>"
    "{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n"
    "{% endif %}"
)
_SMOLLM = (
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ content.lstrip('\n') }}<|im_end|>\n{% endgeneration %}"
    "{% else %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
) + _PROMPT
_GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% elif m.role == 'assistant' %}<|assistant|>{{ '\n' + m.content.strip() if m.content.strip() }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_IM = "<|im_start|> <|im_end|>"
_JSON = '<tool_call>\n{"name": "get", "arguments": {"city": "CITY"}}\n</tool_call>'
_XML = "<tool_call>\n<function=get><parameter=city>\nCITY\n</parameter></function>\n</tool_call>"
PUBLISHED = {
    "qwen2.5": Published(_chatml("{{ m.content }}" + _JSON_CALL), _IM, _JSON),
    "qwen3": Published(_chatml(_THOUGHT + _JSON_CALL, _QUIET, _LAST_QUERY), _IM, _JSON, thinks=True),
    "qwen3_thinking": Published(_chatml(_THOUGHT + _JSON_CALL, _OPENED, _LAST_QUERY), _IM, _JSON, thinks=True),
    "qwq": Published(_chatml("{{ m.content.split('</think>')[-1].lstrip('\n') }}" + _JSON_CALL, _OPENED), _IM, _JSON),
    "qwen3_coder": Published(_chatml(_XML_CALL), _IM, _XML),
    "llama3": Published(
        _LLAMA,
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        '{"name": "get", "parameters": {"city": "CITY"}}',
    ),
    "mistral": Published(
        _MISTRAL,
        "<s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] </s>",
        '[TOOL_CALLS][{"name": "get", "arguments": {"city": "CITY"}}]',
    ),
    "gemma": Published(_GEMMA, "<bos> <start_of_turn> <end_of_turn>", system=False),
    "deepseek": Published(
        _DEEPSEEK,
        "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
        "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜end▁of▁sentence｜>",
        '<｜tool▁call▁begin｜>get\n```json\n{"city": "CITY"}\n```<｜tool▁call▁end｜>',
        arguments_as_text=True,
    ),
    "glm": Published(
        _GLM,
        "[gMASK] <sop> <|system|> <|observation|> <|assistant|> <|user|>",
        "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n</tool_call>",
    ),
    "smollm": Published(_SMOLLM, _IM),
}


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tiny tokenizer with the control tokens and the template of a published model."""
    tokenizer, shape = tiny_tokenizer(), PUBLISHED[name]
    tokens = shape.tokens.split()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", *tokens], "eos_token": tokens[-1], "bos_token": tokens[0]}
    )
    tokenizer.chat_template = shape.jinja
    return tokenizer


def base_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as base models such as GPT-2 have: one control token, ``<|endoftext|>``, and no template."""
    trained = Tokenizer.from_str(_trained(("2+2 is 4, and 3+3 is 6. What is it?",), 300, ("<|endoftext|>",)))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>")
