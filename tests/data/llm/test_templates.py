"""Which template is used, and what may be registered."""

from __future__ import annotations

import pytest
from tensordict import lazy_stack

from llmrl.data.llm import History, add_chat_template, find_template
from llmrl.data.llm.templates import _TEMPLATES
from llmrl.errors import TemplateError
from llmrl.testing import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(autouse=True)
def _restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in _TEMPLATES if name not in ("chatml_format", "qwen")]:
        monkeypatch.delitem(_TEMPLATES, name)
    monkeypatch.setattr("llmrl.data.llm.templates._TEMPLATES", dict(_TEMPLATES))


def test_choice_goes_from_the_explicit_to_the_guess():
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "someone/Qwen-like"
    tokenizer.chat_template = TEMPLATE
    assert find_template(tokenizer, "chatml_format", template="text").jinja == "text"
    assert find_template(tokenizer, "chatml_format").name == "chatml_format"
    assert find_template(tokenizer).jinja == TEMPLATE  # its own, whatever its name says
    tokenizer.chat_template = None
    assert find_template(tokenizer).name == "qwen"
    tokenizer.name_or_path = "someone/else"
    assert find_template(tokenizer).name == "chatml_format"


def test_tokenizer_with_several_templates():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "D", "rag": "R"}
    assert find_template(tokenizer).jinja == "D"
    assert find_template(tokenizer, "rag").jinja == "R"


def test_registered_template_is_found_by_keyword_and_reads_back():
    def parse(text: str) -> History:
        turns = [turn.split("]", 1) for turn in text.replace("</s>", "").split("[")[1:]]
        return lazy_stack([History(role=role, content=content) for role, content in turns])

    add_chat_template("bracket", TEMPLATE, parse, ["Bracket"])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = "org/my-BRACKET-7b"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    history = History.from_chats([chat])
    [text] = history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
    assert text == "[user]Hi</s>[assistant]Hello</s>"
    assert History.from_text(text, chat_template_name="bracket").to_chats() == chat


def test_same_template_twice_is_fine_another_under_its_name_is_not():
    add_chat_template("bracket", TEMPLATE)
    add_chat_template("bracket", TEMPLATE)
    with pytest.raises(ValueError, match="'bracket' is taken"):
        add_chat_template("bracket", TEMPLATE + " ")


def test_template_without_generation_block_is_refused():
    with pytest.raises(ValueError, match="generation"):
        add_chat_template("silent", "{{ messages }}")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(TemplateError, match=r"got 'qwn', known: chatml_format, qwen\. Did you mean 'qwen'\?"):
        find_template(None, "qwn")


def test_template_without_parser_cannot_be_read_back():
    add_chat_template("bracket", TEMPLATE)
    with pytest.raises(TemplateError, match="inverse parser"):
        History.from_text("[user]Hi</s>", chat_template_name="bracket")


@pytest.mark.parametrize("name", ["chatml_format", "qwen"])
def test_built_in_text_begins_with_the_text_of_shorter_conversations(name: str):
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "<think>t</think>A"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "B"},
    ]
    whole = History.from_messages(chat).apply_chat_template(chat_template_name=name, add_generation_prompt=False)
    for length in range(1, len(chat)):
        shorter = History.from_messages(chat[:length])
        prompts = chat[length]["role"] == "assistant"
        assert whole.startswith(shorter.apply_chat_template(chat_template_name=name, add_generation_prompt=prompts))
