"""Values of messages: written in full by every template, or an error that names the message. Nothing is dropped."""

import json
from typing import Any

import pytest
import torch

from llmrl.data.llm import History
from llmrl.data.llm.message_forms import named_keys
from llmrl.data.llm.templates import _BUILT_IN
from llmrl.errors import TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.published_templates import PUBLISHED, published_tokenizer
from tests.support.rendering import CHATML
from tests.support.template_families import ANSWER, CALLING, LAST, MORE, RESULT, USER

RENDERERS = [*_BUILT_IN, *PUBLISHED]
CALLERS = [name for name in PUBLISHED if PUBLISHED[name].calls]
THOUGHTS = {"reasoning_content", "thinking", "reasoning"}
PARTS = [{"type": "text", "text": "It is "}, {"type": "text", "text": "42."}]


def renderer_of(name: str) -> Renderer:
    return Renderer(published_tokenizer(name) if name in PUBLISHED else tiny_tokenizer(template=name))


def refuses(renderer: Renderer, chat: list[dict[str, Any]], words: str) -> None:
    """Every way to render the conversation ends in this error."""
    ways = [lambda: renderer.render([[USER, ANSWER], chat]), lambda: renderer.prompt_ids([[USER], chat])]
    history, options = History.from_messages(chat), {"tokenizer": renderer.tokenizer}
    ways += [lambda: history.apply_chat_template(chat_template=renderer.template.jinja, **options)]
    ways += [lambda: history.apply_chat_template(tokenize=True, chat_template=renderer.template.jinja, **options)]
    for way in ways:
        with pytest.raises(TemplateError, match=words):
            way()


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize(
    "key", ["function_call", "reasoning_content", "thinking", "reasoning", "tool_plan", "function", "arguments", "user"]
)
def test_a_key_of_a_message_is_read_by_the_template_or_refused(name: str, key: str):
    """Regression: an answer with a function_call alone trained the model to stop; thoughts were never trained; a key
    that the template names for something else, such as the function of a call, was left out without a word.
    """
    renderer = renderer_of(name)
    value = {"name": "add", "arguments": "{}"} if key == "function_call" else "12 and 30"
    chat = [USER, ANSWER | {key: value}]
    names = named_keys(renderer.template.jinja) - {"function", "arguments", "user"}
    if key in names or (key in THOUGHTS and names & THOUGHTS):
        [row] = renderer.render([chat])
        assert "12 and 30" in renderer.tokenizer.decode(row.ids[row.assistant_mask])
    else:
        refuses(renderer, chat, rf"not of message 1 of conversation [01], role 'assistant': it does not use {key},")
    renderer.render([[USER, ANSWER | {key: None, "name": "me", "tool_call_id": "1"}]])


@pytest.mark.parametrize("name", RENDERERS)
def test_the_name_of_an_author_is_written_or_noted_and_an_answer_is_not_empty(name: str):
    renderer = renderer_of(name)
    renderer.check()
    assert renderer.unused_keys == []
    [ids] = renderer.prompt_ids([[USER, ANSWER | {"name": "Zoe"}]])
    assert ("name" in renderer.unused_keys) != ("Zoe" in renderer.tokenizer.decode(ids)), "a name is written or noted"
    for empty in ({"role": "assistant"}, {"role": "assistant", "content": None, "name": "me"}):
        refuses(renderer, [USER, empty, MORE, LAST], "message 1 .*role 'assistant': it must have content, or calls")


def test_a_thought_has_the_name_that_the_template_reads_in_earlier_turns_too():
    renderer, thought = renderer_of("qwen3"), "12 and 30"
    [row, other] = renderer.render([[USER, CALLING | {key: thought}, RESULT] for key in ("reasoning", "thinking")])
    assert torch.equal(row.ids, other.ids)
    renderer.render([[USER, ANSWER | {"thinking": thought, "reasoning_content": None}, MORE, LAST]])
    with pytest.raises(TemplateError, match="it must have one thought: thinking is another"):
        renderer.render([[USER, ANSWER | {"thinking": "a", "reasoning_content": "b"}]])


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"trainable": False}, {"training": False}])
@pytest.mark.parametrize("name", ["qwen", "qwen2.5", "qwen3"])
def test_a_flag_leaves_a_message_out_of_the_mask_and_changes_nothing_else(name: str, flag: dict[str, Any]):
    renderer = renderer_of(name)
    [plain] = renderer.render([[USER, ANSWER, MORE, LAST]])
    [row] = renderer.render([[USER | flag, ANSWER | flag, MORE, LAST | {"weight": 1.0, "train": True}]])
    assert torch.equal(row.ids, plain.ids)
    assert row.assistant_mask.nonzero().flatten().tolist() == list(range(*plain.spans[1]))
    assert torch.equal(renderer.prompt_ids([[USER | flag]])[0], renderer.prompt_ids([[USER]])[0])
    with pytest.raises(TemplateError, match="all are left out"):
        renderer.render([[USER, ANSWER | flag]])
    with pytest.raises(TemplateError, match=r"'weight' must be true, false, 0 or 1: got 0\.5"):
        renderer.render([[USER, ANSWER | {"weight": 0.5}]])


@pytest.mark.parametrize("role", ["developer", "function", "ipython", "observation", "critic"])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3_coder", "mistral", "deepseek"])
@pytest.mark.parametrize("content", ["Answer in Danish.", "a"])
def test_a_message_of_a_role_that_the_template_leaves_out_is_refused(name: str, role: str, content: str):
    renderer = renderer_of(name)
    lost = {"role": role, "content": content}
    refuses(renderer, [lost, USER, ANSWER], rf"message 0 of conversation [01], role '{role}', is not")
    refuses(renderer, [USER, CALLING, RESULT, lost, ANSWER] if name != "deepseek" else [USER, lost, ANSWER], role)
    [whole] = renderer.render([[USER, ANSWER]])
    with pytest.raises(TemplateError, match=f"message 2 of conversation 0, role '{role}'"):
        renderer.extend([whole.ids], [[USER, ANSWER, lost]], [1])
    assert Renderer(tiny_tokenizer(), chat_template=CHATML).render([[lost, USER, ANSWER]])


def test_a_second_system_message_and_an_answer_beside_a_call_are_not_lost():
    first, second = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    late = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'system' or loop.first }}")
    refuses(Renderer(tiny_tokenizer(), chat_template=late), [first, USER, second, ANSWER], "message 2 .*'system'")
    with pytest.raises(TemplateError, match="message 1 of conversation 0, role 'assistant', is not"):
        renderer_of("llama3").render([[USER, CALLING | {"content": "Let me see."}, RESULT, ANSWER]])


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("who", [0, 1])
def test_text_parts_are_joined_where_the_template_writes_text_alone(name: str, who: int):
    """Regression: the parts were trained as the text of a Python list."""
    renderer, joined, split = renderer_of(name), [dict(USER), dict(ANSWER)], [dict(USER), dict(ANSWER)]
    joined[who]["content"], split[who]["content"] = "It is 42.", PARTS
    [one], [other] = renderer.render([joined]), renderer.render([split])
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.assistant_mask, other.assistant_mask)
    history = History.from_messages(split).apply_chat_template(
        tokenizer=renderer.tokenizer, add_generation_prompt=False
    )
    assert history == renderer.tokenizer.decode(one.ids)
    split[who]["content"] = [*PARTS, {"type": "audio", "audio": "a.wav"}]
    with pytest.raises(TemplateError):
        renderer.render([split])


VALUES = [{"celsius": 21, "rain": False, "until": None}, [{"id": 1}, {"id": "é"}], [1, 2], 21, True]


@pytest.mark.parametrize("name", [*CALLERS, "qwen", "qwen3"])
@pytest.mark.parametrize("value", VALUES)
def test_a_tools_result_that_is_no_text_is_written_as_json(name: str, value: Any):
    renderer = renderer_of(name)
    written = json.dumps(value, ensure_ascii=False)
    [row] = renderer.render([[USER, CALLING, RESULT | {"content": value}, ANSWER]])
    assert written in renderer.tokenizer.decode(row.ids)
    with pytest.raises(TemplateError, match=r"message 2 .*'tool': its content must be text, parts or a JSON value"):
        renderer.render([[USER, CALLING, RESULT | {"content": object()}, ANSWER]])


@pytest.mark.parametrize("name", [*CALLERS, "qwen", "qwen3", "llama3", "deepseek", "gpt_oss"])
def test_arguments_of_a_call_may_be_an_object_or_its_json_text(name: str):
    """Regression: text, which is OpenAI's format, was encoded twice; templates that concatenate refused objects."""
    renderer = renderer_of(name)
    arguments = {"city": "Oslo é", "unit": None, "days": [1, 2]}
    texts = []
    for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
        for call in ({"name": "get", "arguments": given}, {"name": "get", "arguments": given, "more": 1}):
            calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
            [row] = renderer.render([[USER, calling, RESULT, ANSWER]])
            texts.append(renderer.tokenizer.decode(row.ids[slice(*row.spans[0])]))
    assert len(set(texts[::2])) == 1
    assert "Oslo é" in texts[0]
    assert '\\"' not in texts[0]
    assert "None" not in texts[0] or name == "qwen3_coder"
