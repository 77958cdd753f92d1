"""Every built-in chat template, by property: its text, its mask, its inverse, its prefixes, its markers."""
# ruff: noqa: RUF001 (DeepSeek writes its markers with full-width bars)

import json
import random
from typing import Any

import pytest
import torch

from llmrl.data.llm import History
from llmrl.data.llm.templates import _BUILT_IN
from llmrl.errors import TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.golden import check_golden
from tests.support.published_templates import PUBLISHED, Published, published_tokenizer
from tests.support.template_families import (
    ANSWER,
    CALL,
    CALLING,
    FAMILIES,
    LAST,
    MORE,
    NAMES,
    RESULT,
    SYSTEM,
    USER,
    WITH_CALLS,
    conversation,
    family,
    trained,
    written,
)


def test_every_built_in_family_is_in_the_table():
    assert sorted(FAMILIES) == sorted(_BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_that_of_the_familys_documentation(name: str):
    assert written(name, conversation(name)) == FAMILIES[name].text
    asked = conversation(name)[:-1]
    prompt = written(name, asked, add_generation_prompt=True)
    assert prompt == written(name, asked) + FAMILIES[name].prompt
    assert FAMILIES[name].text.startswith(prompt)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_tool_turns_are_those_of_the_familys_documentation(name: str):
    chat = [USER, CALLING, RESULT, ANSWER]
    assert written(name, chat) == FAMILIES[name].calls
    assert FAMILIES[name].calls.startswith(written(name, chat[:3], add_generation_prompt=True))


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "The first one."},
                "b": {"type": ["integer", "null"]},
                "unit": {"type": "string", "enum": ["m", "km"], "default": "m"},
                "more": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
            },
            "required": ["a", "b"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def test_tools_are_declared_as_in_the_familys_documentation():
    """Llama 3 in the first question, gpt-oss as types in the developer's turn."""
    system = [SYSTEM, USER, ANSWER, MORE]
    texts = [written("llama3", system, tools=[NOW]), written("llama3", [USER], tools=[NOW])]
    texts += [written("gpt_oss", [SYSTEM, USER], tools=[ADD, NOW]), written("gpt_oss", [USER], tools=[NOW])]
    check_golden("tool_declarations", "\n---\n".join(texts))


def test_gpt_oss_keeps_the_analysis_of_calls_until_the_question_is_answered():
    thinking = CALLING | {"reasoning_content": "I shall add."}
    answer = ANSWER | {"reasoning_content": "That was it."}
    open_question = written("gpt_oss", [USER, thinking, RESULT], add_generation_prompt=True)
    analysis = "<|channel|>analysis<|message|>I shall add.<|end|><|start|>assistant<|channel|>commentary to="
    assert f"{analysis}functions.add" in open_question
    answered = written("gpt_oss", [USER, thinking, RESULT, answer])
    assert answered.startswith(open_question), "up to the answer nothing is rewritten"
    assert "That was it." in answered
    later = written("gpt_oss", [USER, thinking, RESULT, answer, MORE, LAST])
    assert "I shall add." not in later
    assert "That was it." not in later
    assert History.from_text(answered, chat_template_name="gpt_oss").to_chats() == [USER, thinking, RESULT, answer]


@pytest.mark.parametrize("name", [name for name in NAMES if not FAMILIES[name].calls])
def test_format_without_tools_refuses_them_instead_of_dropping_them(name: str):
    with pytest.raises(TemplateError, match="tool"):
        written(name, [USER, ANSWER], tools=[{"type": "function", "function": {"name": "add"}}])
    with pytest.raises(TemplateError, match=r"message 1, role 'assistant'|tool|turn"):
        written(name, [USER, CALLING])


@pytest.mark.parametrize("name", [name for name in NAMES if not FAMILIES[name].has_system])
def test_format_without_system_turn_refuses_it(name: str):
    with pytest.raises(TemplateError, match="user"):
        written(name, [SYSTEM, USER, ANSWER])


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_call_needs_no_content(name: str, content: dict[str, Any]):
    calling = {"role": "assistant", "tool_calls": [CALL]} | content
    assert written(name, [USER, calling, RESULT, ANSWER]) == FAMILIES[name].calls


@pytest.mark.parametrize("name", NAMES)
def test_mask_covers_exactly_what_the_assistant_wrote_and_its_end(name: str):
    renderer = family(name)
    assert trained(renderer, conversation(name)) == FAMILIES[name].answers
    report = renderer.check()
    assert report.stop_token_trained
    assert report.prefix_preserving == (not _BUILT_IN[name].rewrites), report.reason
    repeated = [USER, {"role": "assistant", "content": USER["content"]}]
    assert [span.count(USER["content"]) for span in trained(renderer, repeated)] == [1]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_tool_calls_are_trained_and_tool_answers_are_not(name: str):
    spans = trained(family(name), [USER, CALLING, RESULT, ANSWER])
    assert len(spans) == 2
    assert "add" in spans[0]
    assert "12" in spans[0]
    assert "42" not in spans[0]
    assert spans[1].endswith(f"It is 42.{family(name).codec.end_of_turn}")


def test_answer_whose_end_the_template_rewrites_needs_generation_blocks():
    """Without blocks an answer lasts up to its end marker; here the first one's is gone and the last one's is found."""
    tokenizer = tiny_tokenizer(template="gpt_oss")
    for block in ("{%- generation %}", "{%- endgeneration %}"):
        tokenizer.chat_template = tokenizer.chat_template.replace(block, "")
    renderer = Renderer(tokenizer)
    assert trained(renderer, [USER, ANSWER]) == ("<|channel|>final<|message|>It is 42.<|return|>",)
    with pytest.raises(TemplateError, match="message 1 of conversation 0 is not, another turn begins"):
        renderer.render([[USER, ANSWER, MORE, LAST]])


@pytest.mark.parametrize("name", NAMES)
def test_reading_inverts_writing(name: str):
    chat = conversation(name)
    assert History.from_text(written(name, chat), chat_template_name=name).to_chats() == chat
    asked = written(name, chat[:-1], add_generation_prompt=True)
    history = History.from_text([asked, asked], chat_template_name=name)
    assert history.to_chats() == [chat[:-1]] * 2
    assert all(all(row) for row in history.is_complete)


PIECES = ["42", "é", "漢", " ", "  ", "\n", "\n\n", "<|", "|>", "<", "[", "INST]", "user", "assistant", "system\n"]
PIECES += ["\t", "</", "{}"]


@pytest.mark.parametrize("name", NAMES)
def test_random_contents_are_read_back_and_masked_character_for_character(name: str):
    generator = random.Random(NAMES.index(name))
    renderer = family(name)
    plain = conversation(name)
    expected = FAMILIES[name].answers
    for _ in range(25):
        words = ["".join(generator.choices(PIECES, k=generator.randrange(1, 9))).strip() or "x" for _ in plain]
        chat = [message | {"content": word} for message, word in zip(plain, words, strict=True)]
        assert History.from_text(written(name, chat), chat_template_name=name).to_chats() == chat
        changes = zip(expected, (ANSWER, LAST), (chat[-3], chat[-1]), strict=True)
        spans = [span.replace(old["content"], new["content"]) for span, old, new in changes]
        assert list(trained(renderer, chat)) == spans


TWO_CALLS = CALLING | {"content": "Let me see.", "tool_calls": [CALL, CALL]}
CHAIN = [USER, TWO_CALLS, RESULT, RESULT | {"content": "2\n3"}, CALLING, RESULT | {"content": "{}"}, ANSWER]
THOUGHT = {"reasoning_content": "12 and 30\nmake 42"}
THINKING = [ANSWER | THOUGHT, CALLING | THOUGHT, CALLING]


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        *[(name, [USER, ANSWER | {"content": ""}]) for name in NAMES],
        *[(name, [USER, CALLING, RESULT, ANSWER]) for name in WITH_CALLS],
        *[(name, CHAIN) for name in ("qwen", "qwen3", "deepseek")],
        # the line end before a call was missed once, so that the <think> block stayed in the content
        *[(name, [USER, message]) for name in ("qwen3", "gpt_oss") for message in THINKING],
    ],
)
def test_reading_inverts_writing_of_empty_answers_tool_calls_and_thinking(name: str, chat: list[dict[str, Any]]):
    history = History.from_text(written(name, chat), chat_template_name=name)
    assert history.to_chats() == chat
    assert all(history.is_complete)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_answer_is_incomplete(name: str):
    text = written(name, [USER, ANSWER])
    cut = text[: text.index("It is 42.") + 5]
    history = History.from_text(cut, chat_template_name=name)
    assert history.content == [USER["content"], "It is"]
    assert history.is_complete == [True, False]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dialogpt"])  # any text is a turn of DialoGPT's
def test_text_of_another_format_is_refused(name: str):
    with pytest.raises(TemplateError, match="must hold a message"):
        History.from_text("hello", chat_template_name=name)


KEEPING = [name for name in WITH_CALLS if not _BUILT_IN[name].rewrites]
NUM_CALLS = {name: (1,) if name in ("llama3", "gpt_oss") else (1, 2) for name in KEEPING}  # of one message


@pytest.mark.parametrize(("name", "num_calls"), [(name, number) for name in KEEPING for number in NUM_CALLS[name]])
def test_stream_goes_on_after_tool_calls(name: str, num_calls: int):
    renderer = family(name)
    chat = [USER, CALLING | {"tool_calls": [CALL] * num_calls}]
    [whole] = renderer.render([chat])
    stream = whole.ids[: whole.spans[-1][1]]
    chat += [RESULT] * num_calls
    [delta] = renderer.extend([stream], [chat], [num_calls])
    assert torch.cat([stream, delta]).tolist() == renderer.prompt_ids([chat])[0].tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if _BUILT_IN[name].rewrites])
def test_family_that_rewrites_the_past_says_so_and_is_refused_as_a_stream(name: str):
    renderer = family(name)
    report = renderer.check()
    assert not report.prefix_preserving
    assert _BUILT_IN[name].rewrites in report.reason
    thinking = ANSWER | {"reasoning_content": "12 and 30"}
    [whole] = renderer.render([[USER, thinking]])
    with pytest.raises(TemplateError, match="rewrites the past"):
        renderer.extend([whole.ids[: whole.spans[-1][1]]], [[USER, thinking, MORE]], [1])


def test_thinking_is_dropped_once_the_user_speaks_again_but_not_before_a_tool_answers():
    thinking = ANSWER | {"reasoning_content": "12 and 30"}
    assert "<think>\n12 and 30\n</think>\n\nIt is 42." in written("qwen3", [USER, thinking])
    assert "think" not in written("qwen3", [USER, thinking, MORE])
    inside = ANSWER | {"content": "<think>\n12 and 30\n</think>\n\nIt is 42."}
    assert written("qwen3", [USER, inside]) == written("qwen3", [USER, thinking])
    chain = [USER, CALLING | {"reasoning_content": "12 and 30"}, RESULT]
    assert "<think>\n12 and 30\n</think>\n\n<tool_call>" in written("qwen3", chain)


def test_without_thinking_the_empty_block_is_the_prompts_and_not_the_assistants():
    renderer = Renderer(tiny_tokenizer(template="qwen3"), template_kwargs={"enable_thinking": False})
    [prompt] = renderer.prompt_ids([[USER]])
    assert renderer.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert trained(renderer, [USER, ANSWER]) == ("It is 42.<|im_end|>",)
    [row] = renderer.render([[USER, ANSWER]])
    assert row.ids[: len(prompt)].tolist() == prompt.tolist()


def test_analysis_is_trained_with_the_answer_it_leads_to():
    spans = trained(family("gpt_oss"), [USER, ANSWER | {"reasoning_content": "12 and 30"}])
    analysis = "<|channel|>analysis<|message|>12 and 30<|end|>"
    assert spans == (f"{analysis}<|start|>assistant<|channel|>final<|message|>It is 42.<|return|>",)
    prompt = written("gpt_oss", [USER], current_date="2025-06-28", reasoning_effort="high")
    assert "cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: high\n\n# Valid" in prompt


@pytest.mark.parametrize("name", NAMES)
def test_markers_inside_a_message_are_escaped_or_refused(name: str):
    renderer = family(name)
    row = renderer.template
    controls = torch.tensor(renderer.tokenizer.all_special_ids)
    [harmless] = renderer.render([[USER, ANSWER]])
    for marker in (*row.special_tokens, *row.text_markers):
        chat = [USER | {"content": f"Say {marker} twice."}, ANSWER]
        if marker in row.text_markers:
            with pytest.raises(TemplateError, match="message 0 of conversation 0 holds"):
                renderer.render([chat])
            continue
        [quoted] = renderer.render([chat])
        assert torch.isin(quoted.ids, controls).sum() == torch.isin(harmless.ids, controls).sum()
        assert renderer.tokenizer.decode(quoted.ids) == written(name, chat)
        assert trained(renderer, chat)[0].endswith("It is 42." + renderer.codec.end_of_turn)


@pytest.mark.parametrize("content", ["\U000f0000 \U000f0001", "\U000f0000 <|im_end|> \U000f0001"])
def test_characters_of_icon_fonts_are_not_taken_for_escaped_control_tokens(content):
    renderer = family("qwen")
    [row] = renderer.render([[USER | {"content": content}, ANSWER]])
    assert content in renderer.tokenizer.decode(row.ids)


def test_markers_are_refused_by_a_tokenizer_that_does_not_know_them():
    renderer = Renderer(tiny_tokenizer(), chat_template_name="llama3")
    with pytest.raises(TemplateError, match=r"message 0 .* holds '<\|start_header_id\|>'"):
        renderer.render([[USER | {"content": "<|start_header_id|>system<|end_header_id|>"}, ANSWER]])
    renderer.render([[USER, ANSWER | {"content": "The header is <|start_header_id|>."}]])  # an answer may say it


@pytest.mark.parametrize(
    ("jinja", "name"),
    [
        ("{{ '<|start_header_id|>' }}{{ '<|eot_id|>' }}", "llama3"),
        ("{{ '<start_of_turn>' }}{{ '<end_of_turn>' }}", "gemma"),
        ("<｜User｜><｜Assistant｜>", "deepseek"),
        ("<|channel|><|message|><|return|>", "gpt_oss"),
        ("<|im_start|><|im_end|>", "chatml_format"),
    ],
)
def test_text_is_read_by_the_family_that_the_tokenizers_own_template_shows(jinja: str, name: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = jinja
    text = written(name, [USER, ANSWER])
    assert History.from_text(text, tokenizer=tokenizer).to_chats() == [USER, ANSWER]


def test_dialect_of_chatml_is_not_taken_for_chatml():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|im_start|>user<|im_sep|>Hi<|im_end|>"
    with pytest.raises(TemplateError, match="inverse parser"):
        History.from_text("<|im_start|>user<|im_sep|>Hi<|im_end|>", tokenizer=tokenizer)


OPENS_EARLY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}"
    "{% endgeneration %}{% generation %}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
BLOCKS = {name: _BUILT_IN[name].jinja for name in NAMES} | {"smollm": PUBLISHED["smollm"].jinja, "early": OPENS_EARLY}
BLOCKS["within a token"] = (  # " It" begins outside
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("name", "tools"), [*[(name, False) for name in BLOCKS], *[(name, True) for name in WITH_CALLS]]
)
def test_without_the_end_of_turn_generation_blocks_are_those_of_transformers(name: str, tools: bool):
    """Regression: the end marker inside the author's block was cut out, the text after it too."""
    tokenizer, jinja = tiny_tokenizer(template=name if name in NAMES else "qwen"), BLOCKS[name]
    chat = conversation(name) if name in NAMES else [USER, ANSWER, MORE, LAST]
    chat = [USER, CALLING, RESULT, ANSWER] if tools else chat
    [row] = Renderer(tokenizer, chat_template=jinja, include_end_of_turn=False).render([chat])
    options = {"chat_template": jinja, "return_assistant_tokens_mask": True, "return_dict": True}
    theirs = tokenizer.apply_chat_template(chat, **options)
    assert row.ids.tolist() == theirs["input_ids"]
    assert row.assistant_mask.int().tolist() == theirs["assistant_masks"]
    options["include_end_of_turn"], options["add_generation_prompt"] = False, False
    history = History.from_messages(chat).apply_chat_template(tokenizer=tokenizer, **options)
    assert history["assistant_masks"].int().tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "smollm"])
def test_end_of_turn_can_be_left_out_of_the_mask(name: str):
    renderer = Renderer(published_tokenizer(name), include_end_of_turn=False)
    spans = trained(renderer, [USER, ANSWER, MORE, LAST])
    assert [span.split("</think>")[-1].strip() for span in spans] == [ANSWER["content"], LAST["content"]]
    report = renderer.check()
    assert not report.stop_token_trained
    assert "not learn to stop" in report.reason


def random_conversation(generator: random.Random, shape: Published) -> tuple[list[dict[str, Any]], list[str]]:
    """A conversation that the template supports, and what it writes for each assistant message, thoughts left out."""
    pieces = ["Oslo", "é 漢", "42.", "a b", "It is", "<tool", "yes,\tno", "</"]

    def words() -> str:
        return f"{generator.choice(pieces)}{generator.randrange(10**6)}"

    def said(message: dict[str, Any], text: str) -> None:
        thought = shape.thinks and generator.random() < 0.5
        chat.append({"role": "assistant"} | message | ({"reasoning_content": words()} if thought else {}))
        answers.append(text)

    chat: list[dict[str, Any]] = []
    answers: list[str] = []
    if shape.system and generator.random() < 0.5:
        chat.append({"role": "system", "content": words()})
    for _ in range(generator.randrange(1, 4)):
        chat.append({"role": "user", "content": words()})
        while shape.calls and generator.random() < 0.5:
            arguments = {"city": words().replace("\t", " ")}
            held = json.dumps(arguments, ensure_ascii=False) if shape.arguments_as_text else arguments
            call = {"type": "function", "function": {"name": "get", "arguments": held}}
            said({"content": "", "tool_calls": [call]}, shape.calls.replace("CITY", arguments["city"]))
            chat.append({"role": "tool", "content": words()})
        said({"content": (answer := words())}, answer)
    return chat, answers


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_answer_and_call_is_trained_once_with_its_end_and_nothing_else_is(name: str):
    """Regression: the call of a thinking model, followed by a question, was refused: its thought is dropped then."""
    tokenizer, shape, generator = published_tokenizer(name), PUBLISHED[name], random.Random(name)
    renderer = Renderer(tokenizer)
    for _ in range(40):
        chat, answers = random_conversation(generator, shape)
        [row] = renderer.render([chat])
        assert row.ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
        spans = [tokenizer.decode(row.ids[start:end]) for start, end in row.spans]
        thoughts = [message.get("reasoning_content", "") for message in chat if message["role"] == "assistant"]
        for span, answer, thought in zip(spans, answers, thoughts, strict=True):
            assert span.endswith(renderer.codec.end_of_turn)
            before, _, kept = span.removesuffix(renderer.codec.end_of_turn).rpartition("</think>")
            assert kept.strip() == answer.strip()
            assert before.removeprefix("<think>").strip() in ("", thought.strip())
        others = tokenizer.decode(row.ids[~row.assistant_mask])
        assert not any(text in others for text in [*answers, *filter(None, thoughts)])
